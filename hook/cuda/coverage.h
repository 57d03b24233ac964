// SPDX-License-Identifier: Apache-2.0
#ifndef NVSHARE_COVERAGE_H
#define NVSHARE_COVERAGE_H

#include <stdint.h>

/* Entry points of the driver that submit work, as this application sees them. */
struct nvs_coverage {
	uint32_t interposed; /* lead to the shim, whichever way they are resolved */
	uint32_t bypassed;   /* at least one way leads past it */
};

/* Asks every resolver as the application would. After nvs_resolve(). */
struct nvs_coverage nvs_coverage_check(void);

#endif
