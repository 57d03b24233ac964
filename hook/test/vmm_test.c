// SPDX-License-Identifier: Apache-2.0
/*
 * vmm_test.c: memory that the application makes and maps itself leaves the
 * simulated GPU and comes back. Run like swap_test; the process itself is the
 * scheduler and the judge, tenants are processes of their own.
 */
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "tenant.h"

#define GPU (96 * MIB)
#define GRANULE (2 * MIB)
#define PIECES 256

static const char *self;

/* ---- the application's own VMM ---- */

static const CUmemAllocationProp usual_prop = {
	.type = CU_MEM_ALLOCATION_TYPE_PINNED,
	.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FD,
	.location = { CU_MEM_LOCATION_TYPE_DEVICE, 0 },
};
static const CUmemAccessDesc usual_access = {
	.location = { CU_MEM_LOCATION_TYPE_DEVICE, 0 },
	.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
};

static bool is_virtual(CUmemGenericAllocationHandle h)
{
	return h >> 48 == 0x4e56;
}

static CUmemGenericAllocationHandle make(uint64_t bytes)
{
	CUmemGenericAllocationHandle h;

	CU(cuMemCreate(&h, bytes, &usual_prop, 0));
	return h;
}

static CUdeviceptr reserve(uint64_t bytes)
{
	CUdeviceptr p;

	CU(cuMemAddressReserve(&p, bytes, 0, 0, 0));
	return p;
}

static void map(CUdeviceptr p, uint64_t bytes, CUmemGenericAllocationHandle h)
{
	CU(cuMemMap(p, bytes, 0, h, 0));
	CU(cuMemSetAccess(p, bytes, &usual_access, 1));
}

/* ---- tenants ---- */

/* A range that grows and shrinks at its end, in pieces, as PyTorch's expandable segments do. */
struct segment {
	CUdeviceptr base;
	uint64_t piece;
	unsigned count;
	CUmemGenericAllocationHandle handle[PIECES];
	struct buffer b[PIECES]; /* one for each growth, at its first piece */
};

static void grow(struct segment *s, unsigned pieces)
{
	CUdeviceptr from = s->base + s->count * s->piece;
	struct buffer *b = &s->b[s->count];

	b->p = from;
	b->bytes = pieces * s->piece;
	for (unsigned i = 0; i < pieces; i++) {
		s->handle[s->count] = make(s->piece);
		CU(cuMemMap(s->base + s->count * s->piece, s->piece, 0, s->handle[s->count], 0));
		if (i)
			s->b[s->count].p = 0;
		s->count++;
	}
	CU(cuMemSetAccess(from, pieces * s->piece, &usual_access, 1));
	run_fill(b, rnd(1ull << 60), NULL);
}

/* Gives the last growth back. */
static void shrink(struct segment *s)
{
	uint64_t before = used();
	unsigned n = 0;
	bool last;

	CU(cuCtxSynchronize());
	do {
		last = s->b[--s->count].p != 0;
		CU(cuMemUnmap(s->base + s->count * s->piece, s->piece));
		CU(cuMemRelease(s->handle[s->count]));
		n++;
	} while (!last);
	CHECK(used() == before - n * s->piece);
}

static void verify_all(const struct segment *s)
{
	for (unsigned i = 0; i < s->count; i++)
		if (s->b[i].p)
			verify(&s->b[i]);
}

static int tenant_segments(uint64_t mib, unsigned rounds, uint64_t seed)
{
	static struct segment s[2] = { { .piece = GRANULE }, { .piece = 10 * GRANULE } };
	uint64_t large = mib * MIB / 2 / s[1].piece * s[1].piece, small = mib * MIB - large;

	random_state = seed * 0x9e3779b97f4a7c15ull + 1;
	for (unsigned i = 0; i < 2; i++)
		s[i].base = reserve(PIECES * s[i].piece);
	for (unsigned i = 0; i < rounds; i++) {
		while (s[1].count < large / s[1].piece)
			grow(&s[1], 1);
		while (s[0].count < small / GRANULE) {
			unsigned n = 1 + (unsigned)rnd(5), most = (unsigned)(small / GRANULE) - s[0].count;

			grow(&s[0], n < most ? n : most);
		}
		CHECK(is_virtual(s[0].handle[0]));
		work(10);
		verify_all(&s[i % 2]);
		work(10);
		for (unsigned n = (unsigned)rnd(4); n && s[0].count; n--)
			shrink(&s[0]);
		if (rnd(3) == 0)
			shrink(&s[1]);
	}
	for (unsigned i = 0; i < 2; i++) {
		verify_all(&s[i]);
		while (s[i].count)
			shrink(&s[i]);
		CU(cuMemAddressFree(s[i].base, PIECES * s[i].piece));
	}
	CHECK(used() <= 4 * MIB);
	return 0;
}

/* One range for each allocation; who frees asks for the handle, as JAX and NCCL do. */
static int tenant_ranges(uint64_t mib, unsigned rounds, uint64_t seed)
{
	struct buffer b[4] = { { 0 } };

	random_state = seed * 0x9e3779b97f4a7c15ull + 1;
	for (unsigned i = 0; i < rounds + 4; i++) {
		struct buffer *x = &b[i % 4];
		CUmemGenericAllocationHandle h;

		if (x->p) {
			CUdeviceptr base;
			size_t size;

			verify(x);
			CU(cuMemRetainAllocationHandle(&h, (void *)(uintptr_t)(x->p + 100)));
			CHECK(is_virtual(h));
			CU(cuMemGetAddressRange_v2(&base, &size, x->p + x->bytes / 2));
			CHECK(base == x->p && size == x->bytes);
			CHECK(cuMemFree_v2(x->p) == CUDA_ERROR_INVALID_VALUE);
			CU(cuMemUnmap(x->p, size));
			CU(cuMemRelease(h));
			CHECK(cuMemRelease(h) == CUDA_ERROR_INVALID_VALUE);
			CU(cuMemAddressFree(x->p, size));
			x->p = 0;
		}
		if (i >= rounds)
			continue;
		x->bytes = GRANULE * (1 + rnd(mib / 8));
		x->p = reserve(x->bytes);
		h = make(x->bytes);
		map(x->p, x->bytes, h);
		CU(cuMemRelease(h));
		run_fill(x, rnd(1ull << 60), NULL);
		work(10);
		verify(&b[rnd(i < 4 ? i + 1 : 4)]);
	}
	CHECK(used() <= 4 * MIB);
	return 0;
}

/* Idles until so much of the tenant is away. */
#define AWAIT_AWAY(bytes) EVENTUALLY(swapper_away() >= (bytes))

/*
 * What a handle stands for outlives its mappings, wherever it is: all of it goes
 * at once, so that it is known where it is.
 */
static int tenant_handles(uint64_t mib, unsigned rounds, uint64_t seed)
{
	CUmemAccessDesc read_only = { usual_access.location, 1 };
	uint64_t n = mib * MIB / GRANULE * GRANULE;
	CUmemGenericAllocationHandle h = make(n), other;
	CUdeviceptr range = reserve(4 * n);
	CUmemAllocationProp prop;
	unsigned long long flags;
	struct buffer b = { range, n, 0 };

	random_state = seed;
	map(b.p, n, h);
	run_fill(&b, seed, NULL);
	CU(cuMemGetAllocationPropertiesFromHandle(&prop, h));
	CHECK(memcmp(&prop, &usual_prop, sizeof(prop)) == 0);
	for (unsigned i = 0; i < rounds; i++) {
		CUdeviceptr to = range + (i + 1) % 3 * n;

		switch (i % 8) {
		case 0: /* mapped elsewhere while it is here, */
			work(10);
			CU(cuMemUnmap(b.p, n));
			break;
		case 1: /* away, */
			AWAIT_AWAY(n);
			CU(cuMemUnmap(b.p, n));
			CHECK(cuMemUnmap(b.p, n) == CUDA_ERROR_INVALID_VALUE);
			CHECK(swapper_away() >= n);
			break;
		case 2: /* and away when it was unmapped and back when it is mapped */
			AWAIT_AWAY(n);
			CU(cuMemUnmap(b.p, n));
			work(10);
			break;
		case 3: /* what is not used never takes anything */
			AWAIT_AWAY(n);
			other = make(n);
			CU(cuMemMap(range + 3 * n, n, 0, other, 0));
			CU(cuMemUnmap(range + 3 * n, n));
			CU(cuMemMap(range + 3 * n, n, 0, other, 0));
			CU(cuMemRelease(other));
			CU(cuMemUnmap(range + 3 * n, n));
			other = make(n);
			CU(cuMemRelease(other));
			to = b.p;
			break;
		case 4: /* a mapping holds it, and gives a handle */
			CU(cuMemRelease(h));
			CHECK(cuMemRelease(h) == CUDA_ERROR_INVALID_VALUE);
			AWAIT_AWAY(n);
			CU(cuMemRetainAllocationHandle(&h, (void *)(uintptr_t)(b.p + n - 1)));
			CU(cuMemUnmap(b.p, n));
			break;
		case 5: /* ends while it is away, unmapped */
		case 6: /* or mapped */
			AWAIT_AWAY(n);
			if (i % 8 == 5) {
				CU(cuMemUnmap(b.p, n));
				CU(cuMemRelease(h));
			} else {
				CU(cuMemRelease(h));
				CU(cuMemUnmap(b.p, n));
			}
			CHECK(used() <= 4 * MIB);
			h = make(n);
			map(to, n, h);
			b.p = to;
			run_fill(&b, i, NULL);
			break;
		case 7: /* not to be written */
			CU(cuMemSetAccess(b.p, n, &read_only, 1));
			AWAIT_AWAY(n);
			verify(&b);
			CU(cuMemGetAccess(&flags, &usual_access.location, b.p + 5));
			CHECK(flags == 1);
			AWAIT_AWAY(n);
			CU(cuMemSetAccess(b.p, n, &usual_access, 1));
			to = b.p;
			break;
		}
		if (b.p != to) {
			b.p = to;
			map(b.p, n, h);
		}
		CU(cuMemGetAccess(&flags, &usual_access.location, b.p + n - 1));
		CHECK(flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
		verify(&b);
		run_fill(&b, i, NULL);
	}
	CU(cuMemUnmap(b.p, n));
	CU(cuMemRelease(h));
	CHECK(cuMemMap(range, n, 0, h, 0) == CUDA_ERROR_INVALID_VALUE);
	CU(cuMemAddressFree(range, 4 * n));
	CHECK(used() <= 4 * MIB);
	return 0;
}

static void import(CUdeviceptr p, uint64_t bytes, CUmemGenericAllocationHandle h)
{
	CUmemGenericAllocationHandle imported;
	int fd = -1;

	CHECK(cuMemExportToShareableHandle(&fd, h, 8, 0) == CUDA_ERROR_INVALID_VALUE);
	CU(cuMemExportToShareableHandle(&fd, h, CU_MEM_HANDLE_TYPE_POSIX_FD, 0));
	CU(cuMemImportFromShareableHandle(&imported, (void *)(intptr_t)fd, CU_MEM_HANDLE_TYPE_POSIX_FD));
	map(p, bytes, imported);
	CU(cuMemRelease(imported));
	close(fd);
}

/* Who shares a memory keeps it where it is; in the rest nothing changes. */
static int tenant_shares(uint64_t mib, unsigned rounds, uint64_t seed)
{
	uint64_t n = 8 * MIB, large = mib * MIB / GRANULE * GRANULE;
	CUdeviceptr range = reserve(4 * n + large);
	CUmemAccessDesc two[2] = { usual_access, usual_access };
	CUmemGenericAllocationHandle h;
	struct buffer b = { range, n, 0 }, twin = { range + n, n, 0 }, moves = { range + 4 * n, large, 0 };

	two[1].location.id = 1;
	map(moves.p, large, make(large));
	run_fill(&moves, 7 * seed, NULL);
	for (unsigned i = 0; i < rounds; i++) {
		if (i % 2) /* with no memory, or with a content */
			AWAIT_AWAY(large);
		h = make(n);
		CHECK(is_virtual(h));
		switch (i % 12) {
		case 0: /* two mappings */
		case 1:
			map(b.p, n, h);
			map(twin.p, n, h);
			break;
		case 2: /* of somebody whose handle has ended */
		case 3:
			map(b.p, n, h);
			CU(cuMemRelease(h));
			if (i % 2 == 0)
				run_fill(&b, i, NULL);
			CU(cuMemRetainAllocationHandle(&h, (void *)(uintptr_t)b.p));
			map(twin.p, n, h);
			break;
		case 4: /* exported before it is mapped */
		case 5:
			import(twin.p, n, h);
			map(b.p, n, h);
			break;
		case 6: /* and after */
		case 7:
			map(b.p, n, h);
			run_fill(&b, i, NULL);
			AWAIT_AWAY(large);
			import(twin.p, n, h);
			verify(&b);
			break;
		case 8: /* exported when it was unmapped while it was away */
		case 9:
			map(b.p, n, h);
			run_fill(&b, i, NULL);
			AWAIT_AWAY(large + n);
			CU(cuMemUnmap(b.p, n));
			import(twin.p, n, h);
			map(b.p, n, h);
			verify(&b);
			break;
		case 10: /* opened to another GPU by an address, the handle gone */
		case 11:
			map(b.p, n, h);
			run_fill(&b, i, NULL);
			CU(cuMemRelease(h));
			AWAIT_AWAY(large);
			CU(cuMemSetAccess(b.p, n, two, 2));
			CU(cuMemRetainAllocationHandle(&h, (void *)(uintptr_t)b.p));
			CHECK(!is_virtual(h));
			map(twin.p, n, h);
			verify(&b);
			break;
		}
		run_fill(&twin, 1000 + i, NULL);
		CU(cuCtxSynchronize());
		CU(cuMemRelease(h));
		b.seed = twin.seed;
		AWAIT_AWAY(large);
		verify(&b);
		verify(&moves);
		CU(cuCtxSynchronize());
		CU(cuMemUnmap(b.p, 2 * n)); /* both at once */
		CHECK(cuMemUnmap(b.p, n) == CUDA_ERROR_INVALID_VALUE);
		CHECK(used() <= large + 4 * MIB);
	}
	CU(cuMemUnmap(moves.p, large));
	CU(cuMemAddressFree(range, 4 * n + large));
	return 0;
}

/* Memory is mapped while a stream captures, and graphs replay wherever it was. */
static int tenant_capture(uint64_t mib, unsigned rounds, uint64_t seed)
{
	uint64_t n = mib * MIB / 2 / GRANULE * GRANULE;
	struct buffer a = { reserve(2 * n), n, 0 }, b = { a.p + n, n, 0 };
	CUgraphExec exec;
	CUgraph g;
	CUstream s;

	map(a.p, n, make(n));
	CU(cuStreamCreate(&s, CU_STREAM_NON_BLOCKING));
	CU(cuStreamBeginCapture_v2(s, 2));
	run_fill(&a, seed, s);
	nap_ms(60);
	map(b.p, n, make(n));
	CU(cuMemcpyDtoDAsync_v2(b.p, a.p, n, s));
	CU(cuStreamEndCapture(s, &g));
	CU(cuGraphInstantiateWithFlags(&exec, g, 0));
	for (unsigned i = 0; i < rounds; i++) {
		run_fill(&a, 1, NULL);
		run_fill(&b, 2, NULL);
		work(20);
		CU(cuGraphLaunch(exec, s));
		CU(cuStreamSynchronize(s));
		a.seed = b.seed = seed;
		verify(&a);
		work(20);
		verify(&b);
	}
	return 0;
}

/* Threads that work side by side in one range. */
struct lane {
	CUdeviceptr base, wrong;
	uint64_t granules;
	unsigned rounds, number;
};

static void *lane_main(void *arg)
{
	const struct lane *l = arg;
	uint64_t n = l->granules * GRANULE;
	struct buffer b = { 0 };

	CU(cuCtxSetCurrent(ctx));
	for (unsigned i = 0; i < l->rounds; i++) {
		CUmemGenericAllocationHandle h = make(n);

		b = (struct buffer){ l->base + i % 2 * n, n, 0 };
		map(b.p, n, h);
		run_fill(&b, l->number * 1000 + i, NULL);
		if (i % 3)
			CU(cuMemRelease(h));
		nap_ms(5);
		verify_with(&b, l->wrong);
		CU(cuMemUnmap(b.p, n));
		if (i % 3 == 0)
			CU(cuMemRelease(h));
	}
	return NULL;
}

/* A thread that changes the access to a range that another one maps anew, or frees. It may fail, and does no harm. */
static _Atomic CUdeviceptr contended;
static atomic_bool quits;

static void *meddler_main(void *unused)
{
	(void)unused;
	CU(cuCtxSetCurrent(ctx));
	while (!atomic_load(&quits))
		(void)cuMemSetAccess(atomic_load(&contended), 4 * GRANULE, &usual_access, 1);
	return NULL;
}

static int tenant_contends(uint64_t mib, unsigned rounds, uint64_t seed)
{
	CUmemGenericAllocationHandle all = make(4 * GRANULE), one = make(GRANULE);
	CUdeviceptr p;
	pthread_t t[2];

	(void)mib, (void)seed;
	for (unsigned i = 0; i < rounds; i++) {
		p = reserve(4 * GRANULE);
		atomic_store(&contended, p);
		for (unsigned j = 0; i == 0 && j < 2; j++)
			CHECK(pthread_create(&t[j], NULL, meddler_main, NULL) == 0);
		map(p, 4 * GRANULE, all);
		CU(cuMemUnmap(p, 4 * GRANULE));
		map(p, GRANULE, one);
		CU(cuMemUnmap(p, GRANULE));
		CU(cuMemAddressFree(p, 4 * GRANULE));
	}
	atomic_store(&quits, true);
	for (unsigned j = 0; j < 2; j++)
		CHECK(pthread_join(t[j], NULL) == 0);
	return 0;
}

static int tenant_threads(uint64_t mib, unsigned rounds, uint64_t seed)
{
	enum { LANES = 4 };
	uint64_t granules = mib / 2 / LANES;
	CUdeviceptr range = reserve(2 * LANES * granules * GRANULE);
	struct lane l[LANES];
	pthread_t t[LANES];

	for (unsigned i = 0; i < LANES; i++) {
		l[i] = (struct lane){ .base = range + 2 * i * granules * GRANULE, .granules = granules,
				      .rounds = rounds, .number = (unsigned)seed * LANES + i };
		CU(cuMemAlloc_v2(&l[i].wrong, 8));
		CHECK(pthread_create(&t[i], NULL, lane_main, &l[i]) == 0);
	}
	for (unsigned i = 0; i < LANES; i++)
		CHECK(pthread_join(t[i], NULL) == 0);
	CU(cuMemAddressFree(range, 2 * LANES * granules * GRANULE));
	CHECK(used() <= 8 * MIB);
	return 0;
}

/* A process that nobody arbitrates, and takes what memory it can get. */
static int hog(uint64_t mib, unsigned rounds, uint64_t seed)
{
	(void)rounds, (void)seed;
	return take_for_good(mib);
}

/* What wrong calls return, one number each, on standard output. */
static int tenant_errors(uint64_t mib, unsigned rounds, uint64_t seed)
{
	uint64_t n = 2 * GRANULE;
	CUdeviceptr range = reserve(8 * n), p;
	CUmemGenericAllocationHandle h = make(n), other, plain;
	CUmemAllocationProp prop = usual_prop;
	unsigned long long flags;
	int fd;

	(void)mib, (void)rounds, (void)seed;
#define SAY(call) printf("%d %s\n", (int)(call), #call)
	SAY(cuMemCreate(NULL, n, &usual_prop, 0));
	SAY(cuMemCreate(&other, 0, &usual_prop, 0));
	SAY(cuMemCreate(&other, MIB, &usual_prop, 0));
	SAY(cuMemCreate(&other, n, &usual_prop, 1));
	prop.type = 5;
	SAY(cuMemCreate(&other, n, &prop, 0));
	prop = usual_prop;
	prop.location.id = 50;
	SAY(cuMemCreate(&other, n, &prop, 0));
	prop = usual_prop;
	prop.requestedHandleTypes = 8;
	SAY(cuMemCreate(&other, n, &prop, 0));
	SAY(cuMemAddressReserve(&p, MIB, 0, 0, 0));
	SAY(cuMemAddressReserve(&p, n, 3, 0, 0));
	SAY(cuMemAddressReserve(&p, n, 0, 0, 1));
	SAY(cuMemMap(range + MIB, n, 0, h, 0));
	SAY(cuMemMap(range, 2 * n, 0, h, 0));
	SAY(cuMemMap(range, n, GRANULE, h, 0));
	SAY(cuMemMap(range, n, 0, h, 1));
	SAY(cuMemMap(range, 0, 0, h, 0));
	SAY(cuMemMap(range + 8 * n - GRANULE, n, 0, h, 0));
	SAY(cuMemMap(range + 7 * n, n, 0, h, 0));
	SAY(cuMemMap(range + 7 * n + GRANULE, n, 0, h, 0));
	SAY(cuMemMap(range + 7 * n, n, 0, make(n), 0));
	SAY(cuMemSetAccess(range, n, &usual_access, 1));
	SAY(cuMemSetAccess(range + 7 * n, GRANULE, &usual_access, 1));
	SAY(cuMemSetAccess(range + 6 * n, 2 * n, &usual_access, 1));
	SAY(cuMemSetAccess(range + 7 * n, 2 * n, &usual_access, 1));
	SAY(cuMemSetAccess(range + 7 * n, n, NULL, 1));
	SAY(cuMemSetAccess(range + 7 * n, n, &usual_access, 0));
	SAY(cuMemsetD8_v2(range + 7 * n, 1, 100));
	SAY(cuMemSetAccess(range + 7 * n, n, &usual_access, 1));
	SAY(cuMemsetD8_v2(range + 7 * n, 1, 100));
	SAY(cuMemGetAccess(&flags, &usual_access.location, range));
	SAY(cuMemRetainAllocationHandle(&other, (void *)(uintptr_t)range));
	SAY(cuMemRetainAllocationHandle(&other, (void *)(uintptr_t)wrong));
	SAY(cuMemRetainAllocationHandle(NULL, (void *)(uintptr_t)(range + 7 * n)));
	SAY(cuMemExportToShareableHandle(&fd, h, 8, 0));
	prop = usual_prop;
	prop.requestedHandleTypes = 0;
	SAY(cuMemCreate(&plain, n, &prop, 0));
	SAY(cuMemExportToShareableHandle(&fd, plain, CU_MEM_HANDLE_TYPE_POSIX_FD, 0));
	SAY(cuMemFree_v2(range + 7 * n));
	SAY(cuMemFreeAsync(range + 7 * n, NULL));
	SAY(cuMemAddressFree(range, n));
	SAY(cuMemAddressFree(range + n, 7 * n));
	SAY(cuMemAddressFree(range, 8 * n));
	SAY(cuMemUnmap(range + 7 * n, GRANULE));
	SAY(cuMemUnmap(range + 7 * n + GRANULE, GRANULE));
	SAY(cuMemUnmap(range + 6 * n, 2 * n));
	SAY(cuMemUnmap(range + 7 * n, n));
	SAY(cuMemUnmap(range + 7 * n, n));
	SAY(cuMemsetD8_v2(range + 7 * n, 1, 100));
	SAY(cuMemRelease(h));
	SAY(cuMemRelease(h));
	SAY(cuMemMap(range, n, 0, h, 0));
	SAY(cuMemGetAllocationPropertiesFromHandle(&prop, h));
	SAY(cuMemExportToShareableHandle(&fd, h, CU_MEM_HANDLE_TYPE_POSIX_FD, 0));
	SAY(cuMemAddressFree(range, 8 * n));
	SAY(cuMemAddressFree(range, 8 * n));
#undef SAY
	return 0;
}

/* ---- cases ---- */

static const struct swapper_config usual = { .gpu = GPU, .arena = 16 * MIB, .quantum_ms = 30 };

static pid_t start(const char *kind, uint64_t mib, unsigned rounds, unsigned seed)
{
	return start_tenant(self, kind, mib, rounds, seed);
}

static void two_that_do_not_fit(const char *kind)
{
	pid_t a, b;

	schedule(usual);
	swapper_withhold(true); /* so that neither has ended before the other begins */
	a = start(kind, 60, 24, 1);
	b = start(kind, 65, 24, 2);
	EVENTUALLY(swapper_seen().wants == 2);
	swapper_withhold(false);
	CHECK(went_well(a));
	CHECK(went_well(b));
	CHECK(swapper_seen().ready >= 4);
	CHECK(swapper_seen().stuck_memory == 0 && swapper_seen().stuck_error == 0);
	CHECK(swapper_seen().resident_max <= GPU);
	swapper_end();
}

static void segments_take_turns(void) { two_that_do_not_fit("segments"); }

static void ranges_take_turns(void) { two_that_do_not_fit("ranges"); }

static void alone_nothing_moves(void)
{
	schedule(usual);
	CHECK(went_well(start("segments", 70, 5, 1)));
	CHECK(swapper_seen().out == 0 && swapper_seen().stuck_memory == 0);
	swapper_end();
}

/* Beside a tenant that takes its memory away, again and again. */
static void beside_another(const char *kind, uint64_t mib, unsigned rounds)
{
	pid_t a, b;

	schedule(usual);
	b = start("segments", 60, 1000000, 2);
	EVENTUALLY(swapper_seen().resident >= 40 * MIB);
	a = start(kind, mib, rounds, 1);
	CHECK(went_well(a));
	CHECK(swapper_seen().ready > 0 && swapper_seen().out > 0);
	kill(b, SIGKILL);
	CHECK(waitpid(b, NULL, 0) == b);
	swapper_end();
}

static void handles_outlive_mappings(void) { beside_another("handles", 70, 5); }
static void what_is_shared_stays(void) { beside_another("shares", 60, 6); }
static void captures_and_graphs(void) { beside_another("capture", 50, 5); }
static void threads_in_one_range(void) { beside_another("threads", 60, 6); }

static void threads_contend_for_a_range(void)
{
	alarm(PATIENCE_MS / 1000);
	schedule(usual);
	CHECK(went_well(start("contends", 0, 40000, 0)));
	swapper_end();
}

static void memory_that_others_took_is_waited_for(void)
{
	unsigned before;
	pid_t t[2], c;

	schedule(usual);
	for (unsigned i = 0; i < 2; i++)
		t[i] = start("segments", 60 + 5 * i, 1000000, 1 + i);
	EVENTUALLY(swapper_seen().ready > 2);
	c = start("hog", 40, 0, 0);
	EVENTUALLY(swapper_seen().stuck_memory > 0);
	kill(c, SIGKILL);
	CHECK(waitpid(c, NULL, 0) == c);
	before = swapper_seen().ready;
	EVENTUALLY(swapper_seen().ready > before + 3);
	for (unsigned i = 0; i < 2; i++) {
		CHECK(waitpid(t[i], NULL, WNOHANG) == 0); /* it has not found anything wrong */
		kill(t[i], SIGKILL);
		CHECK(waitpid(t[i], NULL, 0) == t[i]);
	}
	swapper_end();
}

/* Has not worked yet, so that its memory is nowhere; what is bound is to be there. */
static int tenant_binds(uint64_t mib, unsigned rounds, uint64_t seed)
{
	CUdeviceptr p = reserve(mib * MIB);
	uint64_t start = test_now();

	(void)rounds;
	(void)seed;
	map(p, mib * MIB, make(mib * MIB));
	CHECK(cuLogicalEndpointBindAddr(1, 0, 0, (void *)(uintptr_t)p, mib * MIB, 0) != CUDA_SUCCESS);
	CHECK(test_now() - start < 120 * 1000000000ull);
	return 0;
}

/* The driver's memory is waited for once, however large the range. */
static void memory_that_is_bound_is_waited_for_once(void)
{
	pid_t c;

	schedule(usual);
	c = start("hog", 90, 0, 0);
	EVENTUALLY(access(taken_path(), F_OK) == 0);
	CHECK(went_well(start("binds", 60, 0, 0)));
	kill(c, SIGKILL);
	CHECK(waitpid(c, NULL, 0) == c);
	swapper_end();
}

/* A tenant's standard output. */
static void output_of(const char *kind, bool native, char *text, size_t size)
{
	int to[2];
	size_t n = 0;
	ssize_t got;
	pid_t pid;

	CHECK(pipe(to) == 0);
	fflush(NULL);
	pid = fork();
	CHECK(pid >= 0);
	if (pid == 0) {
		dup2(to[1], 1);
		close(to[0]);
		if (native)
			unsetenv("LD_PRELOAD");
		execl(self, self, kind, "0", "0", native ? "1" : "2", (char *)NULL);
		_exit(127);
	}
	close(to[1]);
	while ((got = read(to[0], text + n, size - 1 - n)) > 0)
		n += (size_t)got;
	text[n] = 0;
	close(to[0]);
	CHECK(went_well(pid));
}

static void wrong_calls_fail_as_ever(void)
{
	static char native[8192], ours[8192];

	schedule(usual);
	output_of("errors", true, native, sizeof(native));
	output_of("errors", false, ours, sizeof(ours));
	if (strcmp(native, ours) != 0)
		fprintf(stderr, "native:\n%sours:\n%s", native, ours);
	CHECK(strstr(native, "cuMemUnmap") && strcmp(native, ours) == 0);
	swapper_end();
}

/* Without swapping a handle is the driver's. */
static int tenant_native(uint64_t mib, unsigned rounds, uint64_t seed)
{
	uint64_t n = mib * MIB;
	struct buffer b = { reserve(n), n, 0 };
	CUmemGenericAllocationHandle h = make(n);

	(void)rounds;
	CHECK(!is_virtual(h));
	map(b.p, n, h);
	run_fill(&b, seed, NULL);
	verify(&b);
	CU(cuMemUnmap(b.p, n));
	CU(cuMemRelease(h));
	CU(cuMemAddressFree(b.p, n));
	return 0;
}

static void off_is_as_ever(void) { check_off(usual, self, "native", 50, 0, 1); }

static const struct test_case cases[] = {
#define CASE(name) { #name, name }
	CASE(alone_nothing_moves),
	CASE(off_is_as_ever),
	CASE(segments_take_turns),
	CASE(ranges_take_turns),
	CASE(handles_outlive_mappings),
	CASE(what_is_shared_stays),
	CASE(captures_and_graphs),
	CASE(threads_in_one_range),
	CASE(threads_contend_for_a_range),
	CASE(memory_that_others_took_is_waited_for),
	CASE(memory_that_is_bound_is_waited_for_once),
	CASE(wrong_calls_fail_as_ever),
};

static const struct tenant_kind kinds[] = {
	{ "segments", tenant_segments },
	{ "ranges", tenant_ranges },
	{ "handles", tenant_handles },
	{ "shares", tenant_shares },
	{ "capture", tenant_capture },
	{ "threads", tenant_threads },
	{ "contends", tenant_contends },
	{ "hog", hog },
	{ "binds", tenant_binds },
	{ "errors", tenant_errors },
	{ "native", tenant_native },
};

int main(int argc, char **argv)
{
	self = argv[0];
	return run_tenant_or_case(kinds, sizeof(kinds) / sizeof(kinds[0]), tenant_open,
				  cases, sizeof(cases) / sizeof(cases[0]), argc, argv);
}
