"""Why a request is not granted now, and when it may be."""
