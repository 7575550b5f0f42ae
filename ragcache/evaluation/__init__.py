"""`ragcache evaluate`: how good answers over composed states are, and how soon they come, setting by setting."""
