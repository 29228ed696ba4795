# Only in one container image. Podman tells the image; elsewhere the operator sets IMAGE_DIGEST.
package model

import rego.v1

default allow := false

image := "3f1d2c7b8a9e4f5061728394a5b6c7d8e9f00112233445566778899aabbccdde"

allow if the_image

the_image if input.host.container_image_id == image

the_image if input.env.IMAGE_DIGEST == concat(":", ["sha256", image])
