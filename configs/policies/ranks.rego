# At most so many processes together. In Rego null is less than any number, so ask for a number first.
package model

import rego.v1

default allow := false

most := 4

allow if few_enough_ranks

few_enough_ranks if {
	is_number(input.loader.ranks)
	input.loader.ranks <= most
}
