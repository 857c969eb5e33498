"""Files of the simulators: rows that name their file and line in every error, and files written whole."""
