# For a key broker (Trustee KBS), not for the user's machine: `encrypt --remote-policy`, `publish --policy`.
# Hands this model's key to guests only, all of whose parts the attestation service affirms.
package policy

import rego.v1

default allow := false

allow if {
	data.plugin == "resource"
	affirmed
	key_of_this_model
}

affirmed if {
	count(input.submods) > 0
	every part in input.submods {
		part["ear.status"] == "affirming"
	}
}

# Change to the resource that you have put the key under. Older brokers give the path as text, newer ones as a list.
key_of_this_model if {
	is_string(data["resource-path"])
	trim_left(data["resource-path"], "/") == "models/keys/demo"
}

key_of_this_model if data["resource-path"] == ["models", "keys", "demo"]
