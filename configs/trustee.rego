# A resource policy for a Trustee key broker: keys of models go to attested machines that the verifier affirms.
# Install it with: secure-loader publish REF --policy trustee.rego --admin-key admin.pem
#
# A broker has one such policy, for all its resources. What it does not allow it denies.
package policy

import rego.v1

default allow := false

allow if {
	data.plugin == "resource"
	of_models
	affirmed
}

# The repository that master keys are published to: kbs:///models/TYPE/TAG. Older brokers give the path as text, newer
# ones as a list.
of_models if {
	is_string(data["resource-path"])
	startswith(trim_left(data["resource-path"], "/"), "models/")
}

of_models if data["resource-path"][0] == "models"

# The machine, and every device that it attests along with itself. Evidence of the sample attester never gets there.
affirmed if {
	input.submods.cpu0
	every name, submod in input.submods {
		submod["ear.status"] == "affirming"
	}
	not is_sample
}

is_sample if {
	some submod in input.submods
	some name in ["sample", "sampledevice"]
	submod["ear.veraison.annotated-evidence"][name]
}
