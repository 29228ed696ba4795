# Only where the operator says that this is one of these regions, by the environment variable REGION.
package model

import rego.v1

default allow := false

regions := {"eu-central-1", "eu-west-1"}

allow if region_is_allowed

region_is_allowed if input.env.REGION in regions
