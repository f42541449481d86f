"""The way out of a sandbox: what programs inside ask for, decided and done on the host."""
