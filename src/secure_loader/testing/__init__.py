"""For the tests of other projects: run them, unchanged, over encrypted files (:mod:`secure_loader.testing.plugin`)."""
