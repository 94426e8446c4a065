"""Functions that are called in place of transformers' own, of which this package touches the private surface.

``from_pretrained`` stays transformers' own. While a :class:`Session` is active in a thread, ZeRO-3 is hidden from it,
so that it builds the model on the meta device, and in its order

1. ``_load_pretrained_model``: the *stock* function runs on a state dict of lazy tensors, so that renames, conversions,
   prefix and dtype rules and the report of missing keys stay transformers' own. The model gets methods of ours:
2. ``_move_missing_keys_from_meta_to_device``: lazy tensors become what the destination makes of them, and are read;
3. ``_initialize_missing_keys`` and ``_initialize_weights``: values that initialisation touches are in memory;
4. the comparison of tied weights works on partitions.

What is replaced for a load are rows of ``bindings/table.py``, in the order in which they are called.

Tried with transformers 5.1.0, 5.17.0 and 5.23.0.
"""
