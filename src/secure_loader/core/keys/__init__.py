"""Where master keys come from. The provider protocol is in :mod:`core.keys.provider`, one file per provider beside it."""
