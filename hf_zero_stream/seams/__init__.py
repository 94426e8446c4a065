"""Functions that are called in place of transformers' own, of which this package touches the private surface.

``from_pretrained`` stays transformers' own. While a :class:`Session` is active in a thread, some functions differ:

1. ``get_init_context``: the model is built on the meta device instead of inside ``zero.Init``;
2. ``_load_pretrained_model``: the *stock* function runs, in its branch without ZeRO-3, on a state dict of lazy
   tensors, so that renames, conversions, prefix and dtype rules and the report of missing keys stay transformers' own;
3. ``_move_missing_keys_from_meta_to_device``: lazy tensors become ZeRO-3 partitions and are read;
4. ``_initialize_weights`` and the comparison of tied weights work on partitions.

All of them are rows of ``bindings/table.py``, in the order in which they are called.

Tried with transformers 5.1.0, 5.17.0 and 5.23.0.
"""
