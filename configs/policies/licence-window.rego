# A licence for a model and a time: from the first moment of `from` up to, and not including, `until`.
package model

import rego.v1

default allow := false

from := time.parse_rfc3339_ns("2026-01-01T00:00:00Z")

until := time.parse_rfc3339_ns("2027-01-01T00:00:00Z")

allow if {
	licence_begun
	licence_not_over
}

licence_begun if input.time.now_ns >= from

licence_not_over if input.time.now_ns < until
