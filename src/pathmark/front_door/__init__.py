"""The functions that `import pathmark` offers, one file per function or pair; the command line calls nothing else.

Each takes a model (a folder, a hub id, `bundled:tiny`, or a loaded one where that makes sense) and a key (an object,
or a key file with its passphrase), has its options in one config, and returns a result with `.summary()`, a JSON
object, and `.words()`, sentences. Nothing is imported before it is used.
"""
