"""The command line: one file per subcommand, each parses, calls one API function and renders."""
