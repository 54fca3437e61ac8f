"""Dataloaders and samplers, prepared by a run or made by the program."""
