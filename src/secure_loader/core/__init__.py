"""Everything below the adapters: format, keys, trust, reading and writing."""
