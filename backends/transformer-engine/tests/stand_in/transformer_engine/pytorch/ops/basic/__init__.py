"""Operations, of TE's own files."""
