"""Attacks of the project's list that have no ``test_aNN_*`` here, each with the reason.

The list is the table of docs/security.md; test_coverage.py holds the two together.
"""

from __future__ import annotations

NOT_IN_THIS_RELEASE = {
    33: "no kbs: key source",
    71: "no native code, and no release to attest yet",
}

TESTED_ELSEWHERE = {
    48: "test_ciphertext_is_as_long_as_the_tensor",
    66: "test_a_key_object_has_the_length_of_its_algorithm",
    69: "test_plain_save_of_a_secure_model_warns_once",
}
