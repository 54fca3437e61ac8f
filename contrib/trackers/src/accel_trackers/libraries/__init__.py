"""The libraries, one module each; a library is imported when its tracker starts."""
