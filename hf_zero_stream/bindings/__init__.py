"""Patches of other libraries: one table, and one mechanism that installs its rows.

Each row of :mod:`.table` names a function of another library and a function of ours that is called in its place. Rows
are installed for a time, their patch scope (:class:`..registry.PatchScope`): while a thread is inside
``streaming()``, during a load, while a save lays out its files. If a module of the other library has not been imported
yet, the row waits for that. A function of ours is imported at its first call. So entering a block imports no room, and
a room that is not needed stays out.
"""
