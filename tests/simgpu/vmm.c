// SPDX-License-Identifier: Apache-2.0
/*
 * vmm.c: virtual memory management. Physical memory is a stretch of one memfd
 * of the process, so its contents outlive a mapping, as on a GPU. A page before
 * each stretch says what it is: an exported descriptor is the memfd, opened anew,
 * at that page. Who imports it is not charged, and cannot export it again (error 1, as on
 * an H100). A descriptor alone keeps the memory, as there; here it is not charged then.
 */
#include "memory.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define VMM_GRANULE (2ull << 20)

static struct areas reserved; /* address ranges of cuMemAddressReserve */
static int vram_fd = -1;      /* offsets are never reused */
static off_t vram_next;

#define ALIGNED(x) ((x) && (x) % VMM_GRANULE == 0)

#define HEAD_SIZE  4096
#define HEAD_MAGIC 0x4d4d56555047534eull

struct head {
	uint64_t magic, size;
	int gpu, exportable; /* gpu: of the node; written when it is exported */
};

/* The GPU of the node, as this process knows it; -1: it does not see it. */
static int known_gpu(int of_node)
{
	for (int i = 0; i < SIM_MAX_GPUS && dev_gpu(i) >= 0; i++)
		if (sim_at(dev_gpu(i)) == of_node)
			return dev_gpu(i);
	return -1;
}

/* The page before a stretch is locked as long as a descriptor of it is open anywhere. */
static int lock_head(int fd, off_t offset, int cmd, struct flock *l)
{
	*l = (struct flock){ .l_type = cmd == F_OFD_GETLK ? F_WRLCK : F_RDLCK, .l_whence = SEEK_SET,
			     .l_start = offset - HEAD_SIZE, .l_len = HEAD_SIZE };
	return fcntl(fd, cmd, l);
}

CUresult cuMemGetAllocationGranularity(size_t *bytes, const CUmemAllocationProp *prop, int option)
{
	CUresult rc = drv_enter();

	(void)option;
	if (rc)
		return rc;
	if (!bytes || !prop)
		return CUDA_ERROR_INVALID_VALUE;
	*bytes = VMM_GRANULE;
	return CUDA_SUCCESS;
}

CUresult cuMemAddressReserve(CUdeviceptr *p, size_t size, size_t align, CUdeviceptr hint, unsigned long long flags)
{
	CUresult rc = drv_enter();
	uintptr_t raw, base;

	if (rc)
		return rc;
	if (!p || !ALIGNED(size) || flags || (align & (align - 1)))
		return CUDA_ERROR_INVALID_VALUE;
	if (align < VMM_GRANULE)
		align = VMM_GRANULE;
	raw = (uintptr_t)mmap((void *)(uintptr_t)hint, size + align, PROT_NONE,
			      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (raw == (uintptr_t)MAP_FAILED)
		return CUDA_ERROR_OUT_OF_MEMORY;
	base = (raw + align - 1) & ~(align - 1);
	if (base > raw)
		munmap((void *)raw, base - raw);
	if (raw + align > base)
		munmap((void *)(base + size), raw + align - base);
	pthread_mutex_lock(&drv_mu);
	if (area_add(&reserved, (struct area){ .base = base, .size = size }))
		rc = CUDA_ERROR_OUT_OF_MEMORY;
	pthread_mutex_unlock(&drv_mu);
	*p = base;
	return rc;
}

CUresult cuMemAddressFree(CUdeviceptr p, size_t size)
{
	struct area *r, *m;
	CUresult rc = drv_enter();
	int next;

	if (rc)
		return rc;
	pthread_mutex_lock(&drv_mu);
	r = area_find(&reserved, (uintptr_t)p);
	next = area_at(&live, (uintptr_t)p);
	m = area_find(&live, (uintptr_t)p);
	if (!r || r->base != p || r->size != size || m ||
	    (next < live.n && live.a[next].base < (uintptr_t)p + size)) {
		rc = CUDA_ERROR_INVALID_VALUE; /* unknown, or something is still mapped */
	} else {
		munmap((void *)(uintptr_t)p, size);
		area_del(&reserved, r);
	}
	pthread_mutex_unlock(&drv_mu);
	return rc;
}

static struct handle *handle_new(struct phys *ph)
{
	struct handle *h = obj_new(M_HANDLE, sizeof *h);

	if (h) {
		h->phys = ph;
		h->refs = 1;
	}
	return h;
}

static CUresult vmm_entered(const char *call)
{
	__atomic_fetch_add(&drv_calls.vmm, 1, __ATOMIC_RELAXED);
	return drv_entered(call);
}
#define vmm_enter() vmm_entered(__func__)

/* What others have left in it, if the test wants that. */
static void litter(const struct phys *ph)
{
	char page[4096];

	memset(page, 0xa5, sizeof page);
	for (size_t at = 0; getenv("NVSHARE_SIMGPU_GARBAGE") && at < ph->size; at += sizeof page)
		(void)!pwrite(vram_fd, page, sizeof page, ph->offset + (off_t)at);
}

CUresult cuMemCreate(CUmemGenericAllocationHandle *h, size_t size, const CUmemAllocationProp *prop,
		     unsigned long long flags)
{
	CUresult rc = vmm_enter();
	struct phys *ph;
	int gpu;

	if (rc)
		return rc;
	if (!h || !prop || flags || !ALIGNED(size) || prop->type != CU_MEM_ALLOCATION_TYPE_PINNED)
		return CUDA_ERROR_INVALID_VALUE;
	gpu = prop->location.type == CU_MEM_LOCATION_TYPE_DEVICE ? dev_gpu(prop->location.id) : -1;
	if (gpu < 0 && (prop->location.type <= CU_MEM_LOCATION_TYPE_DEVICE || prop->location.type > 4))
		return CUDA_ERROR_INVALID_DEVICE; /* 2, 3, 4: host memory */
	if (prop->requestedHandleTypes & ~CU_MEM_HANDLE_TYPE_POSIX_FD)
		return CUDA_ERROR_NOT_SUPPORTED;
	pthread_mutex_lock(&drv_mu);
	if (vram_fd < 0)
		vram_fd = memfd_create("simgpu-vram", MFD_CLOEXEC);
	ph = obj_new(M_PHYS, sizeof *ph);
	if (ph && !(ph->handle = handle_new(ph))) {
		obj_free(ph);
		ph = NULL;
	}
	if (vram_fd < 0 || !ph || (gpu >= 0 && sim_charge(gpu, size))) {
		if (ph) {
			obj_free(ph->handle);
			obj_free(ph);
		}
		rc = CUDA_ERROR_OUT_OF_MEMORY;
	} else {
		ph->gpu = gpu;
		ph->size = size;
		ph->rdma = prop->allocFlags.gpuDirectRDMACapable;
		struct head head = { HEAD_MAGIC, size, gpu, prop->requestedHandleTypes };

		ph->fd = vram_fd;
		ph->offset = vram_next + HEAD_SIZE;
		vram_next += (off_t)size + HEAD_SIZE;
		if (ftruncate(vram_fd, vram_next) ||
		    pwrite(vram_fd, &head, sizeof head, ph->offset - HEAD_SIZE) != sizeof head) {
			if (gpu >= 0)
				sim_uncharge(gpu, size);
			obj_free(ph->handle);
			obj_free(ph);
			rc = CUDA_ERROR_OUT_OF_MEMORY;
		} else {
			litter(ph);
			*h = (uintptr_t)ph->handle;
		}
	}
	pthread_mutex_unlock(&drv_mu);
	return rc;
}

static void phys_drop(struct phys *ph)
{
	if (ph->maps || ph->handle)
		return;
	if (ph->exchanged)
		sim_count_exchanged(-1);
	if (ph->imported) {
		close(ph->fd);
	} else {
		struct flock l;

		if (!ph->exchanged || lock_head(vram_fd, ph->offset, F_OFD_GETLK, &l) || l.l_type == F_UNLCK)
			(void)!fallocate(vram_fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, ph->offset - HEAD_SIZE,
					 (off_t)ph->size + HEAD_SIZE);
		if (ph->gpu >= 0)
			sim_uncharge(ph->gpu, ph->size);
	}
	obj_free(ph);
}

CUresult cuMemRelease(CUmemGenericAllocationHandle h)
{
	struct handle *handle = (struct handle *)(uintptr_t)h;
	CUresult rc = vmm_enter();

	if (rc)
		return rc;
	pthread_mutex_lock(&drv_mu);
	if (!obj_is(handle, M_HANDLE)) {
		rc = CUDA_ERROR_INVALID_VALUE;
	} else if (--handle->refs == 0) {
		struct phys *ph = handle->phys;

		ph->handle = NULL;
		obj_free(handle);
		phys_drop(ph);
	}
	pthread_mutex_unlock(&drv_mu);
	return rc;
}

CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *h, void *p)
{
	CUresult rc = drv_enter();
	struct area *a;

	if (rc)
		return rc;
	if (!h)
		return CUDA_ERROR_INVALID_VALUE;
	pthread_mutex_lock(&drv_mu);
	a = area_find(&live, (uintptr_t)p);
	if (!a || a->kind != MAPPED) {
		rc = CUDA_ERROR_INVALID_VALUE;
	} else if (a->phys->handle) {
		a->phys->handle->refs++;
	} else if (!(a->phys->handle = handle_new(a->phys))) {
		rc = CUDA_ERROR_OUT_OF_MEMORY;
	}
	if (!rc)
		*h = (uintptr_t)a->phys->handle;
	pthread_mutex_unlock(&drv_mu);
	return rc;
}

CUresult cuMemExportToShareableHandle(void *out, CUmemGenericAllocationHandle h, int type, unsigned long long flags)
{
	struct handle *handle = (struct handle *)(uintptr_t)h;
	CUresult rc = drv_enter();
	struct head head;
	struct flock l;
	char path[32];
	int fd = -1;

	if (rc)
		return rc;
	if (!out || flags || type != CU_MEM_HANDLE_TYPE_POSIX_FD)
		return CUDA_ERROR_INVALID_VALUE;
	pthread_mutex_lock(&drv_mu);
	if (obj_is(handle, M_HANDLE) && !handle->phys->imported &&
	    pread(handle->phys->fd, &head, sizeof head, handle->phys->offset - HEAD_SIZE) == sizeof head &&
	    head.exportable) {
		struct phys *ph = handle->phys;

		head.gpu = ph->gpu < 0 ? -1 : sim_at(ph->gpu);
		snprintf(path, sizeof path, "/proc/self/fd/%d", ph->fd);
		if (pwrite(ph->fd, &head, sizeof head, ph->offset - HEAD_SIZE) == sizeof head)
			fd = open(path, O_RDWR | O_CLOEXEC);
		if (fd >= 0) {
			lseek(fd, ph->offset - HEAD_SIZE, SEEK_SET);
			lock_head(fd, ph->offset, F_OFD_SETLK, &l);
			if (!ph->exchanged++)
				sim_count_exchanged(1);
		}
	}
	pthread_mutex_unlock(&drv_mu);
	*(int *)out = fd;
	return fd >= 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *h, void *os, int type)
{
	CUresult rc = drv_enter();
	struct head head;
	struct phys *ph;
	off_t at;
	int fd, gpu;

	if (rc)
		return rc;
	fd = (int)(intptr_t)os;
	at = lseek(fd, 0, SEEK_CUR);
	if (!h || type != CU_MEM_HANDLE_TYPE_POSIX_FD || at < 0 || pread(fd, &head, sizeof head, at) != sizeof head ||
	    head.magic != HEAD_MAGIC)
		return CUDA_ERROR_INVALID_VALUE;
	gpu = head.gpu < 0 ? -1 : known_gpu(head.gpu);
	if (gpu < 0 && head.gpu >= 0)
		return CUDA_ERROR_INVALID_DEVICE;
	pthread_mutex_lock(&drv_mu);
	ph = obj_new(M_PHYS, sizeof *ph);
	if (ph && (ph->handle = handle_new(ph))) {
		ph->fd = fcntl(fd, F_DUPFD_CLOEXEC, 3); /* the caller closes his */
		ph->imported = ph->exchanged = 1;
		ph->gpu = gpu;
		ph->size = head.size;
		ph->offset = at + HEAD_SIZE;
		*h = (uintptr_t)ph->handle;
		sim_count_exchanged(1);
	} else {
		rc = CUDA_ERROR_OUT_OF_MEMORY;
	}
	pthread_mutex_unlock(&drv_mu);
	return rc;
}

CUresult cuMemMap(CUdeviceptr p, size_t size, size_t offset, CUmemGenericAllocationHandle h, unsigned long long flags)
{
	struct handle *handle = (struct handle *)(uintptr_t)h;
	struct phys *ph = NULL;
	CUresult rc = vmm_enter();
	struct area *r;
	int next;

	if (rc)
		return rc;
	pthread_mutex_lock(&drv_mu);
	r = area_find(&reserved, (uintptr_t)p);
	next = area_at(&live, (uintptr_t)p);
	if (obj_is(handle, M_HANDLE))
		ph = handle->phys;
	if (!ph || flags || offset || size != ph->size || p % VMM_GRANULE || !r ||
	    (uintptr_t)p + size > r->base + r->size || area_find(&live, (uintptr_t)p) ||
	    (next < live.n && live.a[next].base < (uintptr_t)p + size)) {
		rc = CUDA_ERROR_INVALID_VALUE;
	} else if (mmap((void *)(uintptr_t)p, size, PROT_NONE, MAP_SHARED | MAP_FIXED, ph->fd, ph->offset) == MAP_FAILED ||
		   area_add(&live, (struct area){ .base = (uintptr_t)p, .size = size, .kind = MAPPED, .gpu = ph->gpu,
						  .phys = ph })) {
		rc = CUDA_ERROR_OUT_OF_MEMORY;
	} else {
		ph->maps++;
	}
	pthread_mutex_unlock(&drv_mu);
	return rc;
}

const struct area *vmm_range(uintptr_t p)
{
	return area_find(&reserved, p);
}

int vmm_exportable(const struct phys *ph)
{
	struct head head;

	return pread(ph->fd, &head, sizeof head, ph->offset - HEAD_SIZE) == sizeof head ? head.exportable : 0;
}

int vmm_reserved(CUdeviceptr p)
{
	int yes;

	pthread_mutex_lock(&drv_mu);
	yes = area_find(&reserved, (uintptr_t)p) != NULL;
	pthread_mutex_unlock(&drv_mu);
	return yes;
}

/* Calls fn on each mapping of [p, p+size); the range must be whole mappings. goes: it is taken away. */
static CUresult each_mapping(const char *call, CUdeviceptr p, size_t size, CUresult (*fn)(struct area *), int goes)
{
	uintptr_t at, end = (uintptr_t)p + size;
	CUresult rc = vmm_entered(call);

	if (rc)
		return rc;
	pthread_mutex_lock(&drv_mu);
	if (goes)
		work_before_unmapping((uintptr_t)p, size);
	else
		work_before_mapping();
	for (at = (uintptr_t)p; !rc && at < end;) {
		struct area *a = area_find(&live, at);

		if (!a || a->kind != MAPPED || a->base != at || a->size > end - at)
			rc = CUDA_ERROR_INVALID_VALUE;
		else
			at += a->size;
	}
	for (at = (uintptr_t)p; !rc && at < end;) {
		struct area *a = area_find(&live, at);

		at += a->size;
		rc = fn(a);
	}
	pthread_mutex_unlock(&drv_mu);
	return rc;
}

static CUresult unmap_one(struct area *a)
{
	struct phys *ph = a->phys;

	mmap((void *)a->base, a->size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
	area_del(&live, a);
	ph->maps--;
	phys_drop(ph);
	return CUDA_SUCCESS;
}

CUresult cuMemUnmap(CUdeviceptr p, size_t size)
{
	return each_mapping(__func__, p, size, unmap_one, 1);
}

static CUresult open_one(struct area *a)
{
	a->access = 1;
	return mprotect((void *)a->base, a->size, PROT_READ | PROT_WRITE) ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}

static CUresult close_one(struct area *a)
{
	a->access = 0;
	return mprotect((void *)a->base, a->size, PROT_NONE) ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}

/* Whether any of the memory is of another GPU than dev. */
static int elsewhere(uintptr_t p, size_t size, int dev)
{
	int any = 0;

	pthread_mutex_lock(&drv_mu);
	for (uintptr_t at = p; at < p + size;) {
		struct area *a = area_find(&live, at);

		if (!a || a->kind != MAPPED)
			break;
		any = any || (a->phys->gpu >= 0 && a->phys->gpu != dev);
		at = a->base + a->size;
	}
	pthread_mutex_unlock(&drv_mu);
	return any;
}

static void note_opened(uintptr_t p, size_t size, const CUmemAccessDesc *desc)
{
	uint64_t bit = desc->location.type == CU_MEM_LOCATION_TYPE_DEVICE ? 1ull << (desc->location.id & 63) : 0;
	struct area *a;

	pthread_mutex_lock(&drv_mu);
	for (uintptr_t at = p; at < p + size && (a = area_find(&live, at)); at = a->base + a->size)
		a->opened = desc->flags ? a->opened | bit : a->opened & ~bit;
	pthread_mutex_unlock(&drv_mu);
}

CUresult cuMemSetAccess(CUdeviceptr p, size_t size, const CUmemAccessDesc *desc, size_t n)
{
	const char *peers = getenv("NVSHARE_SIMGPU_PEERS");

	if (!desc || !n)
		return CUDA_ERROR_INVALID_VALUE;
	CUresult rc;

	if (desc[0].flags && peers && !strcmp(peers, "refused") && elsewhere((uintptr_t)p, size, desc[0].location.id))
		return CUDA_ERROR_PEER_ACCESS_UNSUPPORTED;
	rc = each_mapping(__func__, p, size, desc[0].flags ? open_one : close_one, !desc[0].flags);
	for (size_t i = 0; !rc && i < n; i++)
		note_opened((uintptr_t)p, size, &desc[i]);
	return rc;
}

CUresult cuMemGetAccess(unsigned long long *flags, const CUmemLocation *location, CUdeviceptr p)
{
	CUresult rc = drv_enter();
	struct area *a;

	if (rc)
		return rc;
	if (!flags || !location)
		return CUDA_ERROR_INVALID_VALUE;
	pthread_mutex_lock(&drv_mu);
	a = area_find(&live, (uintptr_t)p);
	if (a && a->kind == MAPPED)
		*flags = a->opened >> (location->id & 63) & 1 ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE : 0;
	else
		rc = CUDA_ERROR_INVALID_VALUE;
	pthread_mutex_unlock(&drv_mu);
	return rc;
}

CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *prop, CUmemGenericAllocationHandle h)
{
	struct handle *handle = (struct handle *)(uintptr_t)h;
	CUresult rc = drv_enter();
	struct head head = { 0 };

	if (rc)
		return rc;
	pthread_mutex_lock(&drv_mu);
	if (!prop || !obj_is(handle, M_HANDLE) ||
	    pread(handle->phys->fd, &head, sizeof head, handle->phys->offset - HEAD_SIZE) != sizeof head)
		rc = CUDA_ERROR_INVALID_VALUE;
	else
		*prop = (CUmemAllocationProp){ .type = CU_MEM_ALLOCATION_TYPE_PINNED,
					       .requestedHandleTypes = head.exportable,
					       .location = { CU_MEM_LOCATION_TYPE_DEVICE, dev_of_gpu(handle->phys->gpu) } };
	pthread_mutex_unlock(&drv_mu);
	return rc;
}

/* Endpoints come to nothing here: it is only looked whether the memory is there. */
CUresult cuLogicalEndpointBindMem(uint32_t id, CUdevice dev, cuuint64_t at, CUmemGenericAllocationHandle h,
				  cuuint64_t offset, cuuint64_t n, unsigned long long flags)
{
	CUresult rc = drv_enter();

	(void)id, (void)dev, (void)at, (void)offset, (void)flags;
	if (rc)
		return rc;
	pthread_mutex_lock(&drv_mu);
	rc = n && obj_is((struct handle *)(uintptr_t)h, M_HANDLE) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
	pthread_mutex_unlock(&drv_mu);
	return rc;
}

CUresult cuLogicalEndpointBindAddr(uint32_t id, CUdevice dev, cuuint64_t at, void *p, cuuint64_t n,
				   unsigned long long flags)
{
	CUresult rc = drv_enter();

	(void)id, (void)dev, (void)at, (void)flags;
	return rc || mem_valid((uintptr_t)p, n) ? rc : CUDA_ERROR_INVALID_VALUE;
}
