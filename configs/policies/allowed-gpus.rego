# Only on machines all of whose GPUs are of these models.
package model

import rego.v1

default allow := false

allowed_models := {"NVIDIA H100 80GB HBM3", "NVIDIA H200"}

allow if every_gpu_is_allowed

# Where nobody knows, gpus is null; and "every" of an empty list is true, so there has to be one.
gpus_are_known if {
	is_array(input.gpus)
	count(input.gpus) > 0
}

every_gpu_is_allowed if {
	gpus_are_known
	every gpu in input.gpus {
		gpu.model in allowed_models
	}
}
