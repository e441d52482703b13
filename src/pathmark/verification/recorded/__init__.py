"""Evidence that somebody else recorded: probes to hand out, files of routes to read, pairs to make of them."""
