// SPDX-License-Identifier: Apache-2.0
/*
 * hook.h: interposition. Which driver functions exist, where the real ones are, and which pointers
 * the application may not get to see.
 *
 * Start reading here: symbols.h names what is interposed, resolve.c finds the real functions,
 * start.c runs when the driver is first initialised. Below: core/gate.h is the way to the GPU,
 * core/lease.h decides, core/client.c talks to the scheduler, memory/ counts and limits what is
 * allocated, swap/ moves it.
 */
#ifndef NVSHARE_HOOK_H
#define NVSHARE_HOOK_H

#include <stdatomic.h>
#include <stdbool.h>

#include "compiler.h"
#include "memory_driver.h"
#include "symbols.h"

/* The real export of each interposed name; NULL while unknown or absent. */
extern _Atomic(void *) nvs_real_table[NVS_F_COUNT];

/* What the shim itself calls of libnvidia-ml; NULL before a function of it was resolved. */
struct nvs_nvml {
	int (*device_uuid)(void *device, char *uuid, uint size);
};
extern struct nvs_nvml nvs_nvml;

/* The same again of those of ungated.h, for their stubs. */
extern _Atomic(void *) nvs_ungated_table[NVS_CUDA_COUNT - NVS_WRAPPED_COUNT];

extern const char *const nvs_names[NVS_F_COUNT];
extern void *const nvs_wrappers[NVS_F_COUNT];

/* The real function, looked for if need be. One that the driver lacks is nvs_driver_lacks, one that NVML lacks NULL. */
void *nvs_resolve_one(enum nvs_function f);

static inline void *nvs_real_pointer(enum nvs_function f)
{
	void *p;

	if (f < NVS_CUDA_COUNT && nvs_is_suspended())
		nvs_suspended_wait(); /* a caller that asks for it calls it */
	p = atomic_load_explicit(&nvs_real_table[f], memory_order_relaxed);

	return nvs_likely(p != NULL) ? p : nvs_resolve_one(f);
}

/* The real function behind a wrapper, with the wrapper's own type. */
#define NVS_REAL(name) ((__typeof__(&name))nvs_real_pointer(NVS_F_##name))

/* The wrapper of a real export, or p itself if it is not interposed. */
void *nvs_substitute(void *p);

/* Whether p is one of the shim's wrappers. */
bool nvs_is_wrapper(const void *p);

/* Entry points of the driver that submit work, as this application sees them. */
struct nvs_coverage {
	uint32_t interposed; /* lead to the shim, whichever way they are resolved */
	uint32_t bypassed;   /* at least one way leads past it */
};

/* Asks every resolver as the application would. The driver is there. */
struct nvs_coverage nvs_coverage_check(void);

/* Children of a fork start afresh from now on. */
void nvs_at_fork(void);

/* dlsym of the next library in line. */
void *nvs_next_dlsym(void *handle, const char *name);

#endif
