"""Collect the state of a run for `storage`, compare and restore it; read and write whole weights.

A run uses the room through `session.CheckpointSession`.
"""
