"""The state in PostgreSQL, MySQL, MariaDB or SQLite, through SQLAlchemy Core."""
