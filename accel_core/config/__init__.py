"""Options, where their values come from, and what is wrong with them."""
