// SPDX-License-Identifier: Apache-2.0
#ifndef NVSHARE_PROOF_H
#define NVSHARE_PROOF_H

#include <stdint.h>

/* Entry points of the driver that submit work, as this application sees them. */
struct nvs_proof {
	uint32_t interposed; /* lead to the shim, whichever way they are resolved */
	uint32_t bypassed;   /* at least one way leads past it */
};

/* Asks every resolver as the application would. After nvs_resolve(). */
struct nvs_proof nvs_prove(void);

#endif
