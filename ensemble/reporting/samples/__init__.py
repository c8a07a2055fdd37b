"""The samples that an ensemble gets wrong, is unsure of or disagrees on, with the records themselves."""
