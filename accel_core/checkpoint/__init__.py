"""The state of a run: collected for `storage`, compared and restored; and whole weights.

`session` is what a run has of it.
"""
