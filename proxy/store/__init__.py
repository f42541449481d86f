"""All state that outlives a request: rows in one database, contents in one directory or bucket."""
