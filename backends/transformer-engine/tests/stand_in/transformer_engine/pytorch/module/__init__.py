"""Layers, of TE's own files; others need Triton."""
