"""Only replies, or only their times: what is sent to an API, when a reply counts, and the verdict."""
