// SPDX-License-Identifier: Apache-2.0
/* resolve.c: cuGetProcAddress and error names. */
#include "driver.h"

#include <string.h>

/* The table only needs addresses; prototypes of the variants do not matter. */
#define E(base, since, symbol)
#define P(base, since, symbol, suffix) extern void symbol##suffix##_address(void) __asm__(#symbol #suffix);
#include "entries.h"
#undef E
#undef P

CUresult cuGraphInstantiate_v2(CUgraphExec *, CUgraph, CUgraphNode *, char *, size_t);
CUresult cuMemAdvise_v2(CUdeviceptr, size_t, int, CUmemLocation);

static const struct entry {
	const char *base;
	int since;
	void (*legacy)(void);
	void (*per_thread)(void);
} entries[] = {
#define E(base, since, symbol)	       { #base, since, (void (*)(void))symbol, NULL },
#define P(base, since, symbol, suffix) { #base, since, (void (*)(void))symbol, symbol##suffix##_address },
#include "entries.h"
#undef E
#undef P
};

#define PER_THREAD_SINCE 7000

/*
 * As the driver does: names are unversioned; the newest function that is not
 * newer than `version`; an unknown name is no error for _v2.
 */
CUresult cuGetProcAddress_v2(const char *symbol, void **fn, int version, cuuint64_t flags, int *status)
{
	const struct entry *best = NULL;
	int known = 0;
	void (*p)(void) = NULL;

	if (!symbol || !fn || flags > CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM)
		return CUDA_ERROR_INVALID_VALUE;
	for (size_t i = 0; i < sizeof entries / sizeof *entries; i++)
		if (!strcmp(entries[i].base, symbol)) {
			known = 1;
			if (entries[i].since <= version)
				best = &entries[i];
		}
	if (best) {
		p = best->legacy;
		if (flags == CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM && best->per_thread)
			p = version >= PER_THREAD_SINCE ? best->per_thread : NULL;
	}
	*fn = (void *)p;
	if (status)
		*status = p	  ? CU_GET_PROC_ADDRESS_SUCCESS
			  : known ? CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT
				  : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
	return CUDA_SUCCESS;
}

CUresult cuGetProcAddress(const char *symbol, void **fn, int version, cuuint64_t flags)
{
	void *p;
	CUresult rc = fn ? cuGetProcAddress_v2(symbol, &p, version, flags, NULL) : CUDA_ERROR_INVALID_VALUE;

	if (!rc && !p)
		rc = CUDA_ERROR_NOT_FOUND;
	if (!rc)
		*fn = p;
	return rc;
}

/* The driver's private tables do not exist here. */
CUresult cuGetExportTable(const void **table, const CUuuid *id)
{
	(void)id;
	if (!table)
		return CUDA_ERROR_INVALID_VALUE;
	*table = NULL;
	return CUDA_ERROR_NOT_FOUND;
}

static const struct {
	CUresult code;
	const char *name, *text;
} errors[] = {
#define X(name, text) { name, #name, text },
	X(CUDA_SUCCESS, "no error")
	X(CUDA_ERROR_INVALID_VALUE, "invalid argument")
	X(CUDA_ERROR_OUT_OF_MEMORY, "out of memory")
	X(CUDA_ERROR_NOT_INITIALIZED, "initialization error")
	X(CUDA_ERROR_DEINITIALIZED, "driver shutting down")
	X(CUDA_ERROR_NO_DEVICE, "no CUDA-capable device is detected")
	X(CUDA_ERROR_INVALID_DEVICE, "invalid device ordinal")
	X(CUDA_ERROR_INVALID_IMAGE, "device kernel image is invalid")
	X(CUDA_ERROR_INVALID_CONTEXT, "invalid device context")
	X(CUDA_ERROR_INVALID_HANDLE, "invalid resource handle")
	X(CUDA_ERROR_ILLEGAL_STATE, "the operation cannot be performed in the present state")
	X(CUDA_ERROR_NOT_FOUND, "named symbol not found")
	X(CUDA_ERROR_NOT_READY, "device not ready")
	X(CUDA_ERROR_PRIMARY_CONTEXT_ACTIVE, "primary context is active")
	X(CUDA_ERROR_CONTEXT_IS_DESTROYED, "context is destroyed")
	X(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, "part or all of the requested memory range is already mapped")
	X(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, "pointer does not correspond to a registered memory region")
	X(CUDA_ERROR_NOT_PERMITTED, "operation not permitted")
	X(CUDA_ERROR_NOT_SUPPORTED, "operation not supported")
	X(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "operation not permitted when stream is capturing")
	X(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, "operation failed due to a previous error during capture")
	X(CUDA_ERROR_STREAM_CAPTURE_MERGE, "operation would result in a merge of separate capture sequences")
	X(CUDA_ERROR_STREAM_CAPTURE_UNMATCHED, "capture was not ended in the same stream as it began")
	X(CUDA_ERROR_STREAM_CAPTURE_UNJOINED, "capturing stream has unjoined work")
	X(CUDA_ERROR_STREAM_CAPTURE_ISOLATION, "dependency created on uncaptured work in another stream")
	X(CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, "operation would make the legacy stream depend on a capturing blocking stream")
	X(CUDA_ERROR_CAPTURED_EVENT, "operation not permitted on an event last recorded in a capturing stream")
	X(CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD, "attempt to terminate a thread-local capture sequence from another thread")
	X(CUDA_ERROR_UNKNOWN, "unknown error")
#undef X
};

static CUresult error_lookup(CUresult error, const char **str, int want_name)
{
	if (!str)
		return CUDA_ERROR_INVALID_VALUE;
	*str = NULL;
	for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
		if (errors[i].code == error)
			*str = want_name ? errors[i].name : errors[i].text;
	return *str ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuGetErrorName(CUresult error, const char **str)
{
	return error_lookup(error, str, 1);
}

CUresult cuGetErrorString(CUresult error, const char **str)
{
	return error_lookup(error, str, 0);
}
