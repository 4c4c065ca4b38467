"""Pure functions from raw marks to frozen results. Reads no files, renders nothing."""
