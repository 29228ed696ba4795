# Only in a trusted execution environment whose evidence was verified. No loader of this release verifies evidence, so as a
# local policy this denies everywhere: it shows the shape, and what a broker's policy would demand.
package model

import rego.v1

default allow := false

allow if {
	evidence_was_verified
	kind_is_allowed
}

evidence_was_verified if input.tee.verified == true

kind_is_allowed if input.tee.kind in {"tdx", "sev-snp"}
