"""The cluster as TOML: the one reader of its files, and their writer."""
