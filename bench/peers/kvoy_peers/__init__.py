"""Kvoy's router and the field's, side by side on the same engines: `make bench-peers`."""
