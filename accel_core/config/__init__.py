"""Options, the sources of their values, and the mistakes in them."""
