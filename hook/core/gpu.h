// SPDX-License-Identifier: Apache-2.0
/*
 * gpu.h: a GPU of the process: all that the shim knows about it. Frames and pages call it by its
 * channel, the number of its slot in the page.
 */
#ifndef NVSHARE_GPU_H
#define NVSHARE_GPU_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "lease.h"
#include "wire.h"
#include "work.h"

#define NVS_CACHE_LINE 64
#define NVS_MAX_GPUS   NVS_MAX_CHANNELS

/* A GPU as the driver describes it. */
struct nvs_device {
	int dev;                     /* CUdevice */
	uint8_t uuid[NVS_UUID_SIZE]; /* of the GPU where the process is; client.c looks again after a checkpoint */
	uint64_t total_mem;          /* bytes */
};

/* Threads at the gate; wait.c. nvs_client_lock guards this and the structures below, except their atomics. */
struct nvs_waiting {
	atomic_uint followers;     /* futex: threads at the gate, but the leader */
	struct nvs_thread *leader; /* NULL: none */
	atomic_flag spinning;      /* a thread spins for a grant */
	/* Calls that pass during a drain; see may_pass(). */
	uint64_t pass_from_ns;  /* the next window begins, or has begun */
	uint64_t pass_until_ns; /* end of the window; 0: not begun */
	uint64_t pass_gap_ns;   /* from the end of a window to the next */
	uint64_t passed;        /* calls that passed a closed gate, ever */
	uint64_t step_until_ns; /* one call may pass up to then; 0: none */
};

/* drainer.c, and the early release of client.c. */
struct nvs_drains {
	bool started;        /* its thread has been */
	atomic_uint wanted;  /* futex of that thread */
	atomic_bool due;     /* LEASE_ACT_DRAIN is to be done */
	atomic_bool pending; /* a drain began and none has ended since: its work may be left on the GPU */
	atomic_uint look;    /* enum nvs_look: what the thread is to look for */
	atomic_bool leaves;  /* see nvs_gpu_give_back */
	uint64_t idle_calls; /* gated calls at the last look */
	uint64_t idle_ns;    /* and since when that number holds */
};

/* Drains that are cut; preempt.c. */
struct nvs_preemption {
	bool started;            /* its thread has been */
	atomic_uint wanted;      /* futex of that thread */
	bool cuttable;           /* the driver's controls work; of that thread alone */
	bool tells;              /* it is to tell the driver the time slice */
	bool off;                /* the channels are off */
	bool switching;          /* they are being taken off, or put on */
	unsigned looking;        /* threads of effect.c that have them; drains are not cut meanwhile */
	atomic_uint offs;        /* how often they went off */
	uint64_t on_ns;          /* when they were put on */
	uint64_t uncut_ns;       /* closed_ns of a drain that can't be cut */
	unsigned failures;       /* one after the other, since the scheduler was told of the controls */
	uint64_t bound_until_ns; /* after such a failure work is bounded until then */
	unsigned long_drains;    /* so many drains are cut soon, because drains took long */
};

/* effect.c; of the drainer thread alone, but what is atomic. */
struct nvs_effect_looks {
	atomic_uint step; /* futex: where the helper is */
	atomic_bool seen; /* channels that were off were seen to stand still */
	unsigned looks;
};

/* Time slices, and the driver's controls; slice.c. */
struct nvs_slices {
	uint64_t ns;     /* as SLICE said; 0: the driver's own */
	bool due;        /* the driver has not been told */
	atomic_bool ever_set; /* written by the preempter thread alone, as the next */
	uint64_t own_us;      /* the driver's own; 0: not read */
	struct nvs_controls controls; /* as the scheduler was told */
	bool told;
	uint64_t look_ns;       /* of the next look at them */
	unsigned refused_looks; /* since the driver refused a control; of the drainer thread alone */
};

/* Samples of whether the GPU has work; see utilization.h. */
struct nvs_utilization {
	uint64_t due_ns;    /* of the next look */
	uint64_t sent_ns;   /* of the latest frame */
	uint64_t calls;     /* gated calls at the latest look */
	uint64_t called_ns; /* when that number was seen to grow */
	uint32_t samples, busy; /* since the latest frame */
	uint64_t told_calls; /* gated calls up to the latest frame */
};

/* References to the primary context; cuda/context.c. */
struct nvs_primary {
	atomic_int references; /* no more than there are: retains that succeeded, less releases */
	atomic_int releases;   /* under way, of references that are not the last */
};

struct nvs_gpu {
	/* What a gated call reads. Written under nvs_client_lock. */
	_Alignas(NVS_CACHE_LINE) _Atomic(const struct nvs_slot *) slot;
	_Atomic uint32_t epoch; /* NVS_WORD_NONE: closed */
	uint32_t bit;           /* in nvs_thread.in_flight: 1 << number */
	atomic_bool unbound;    /* while nobody waits; see nvs_throttle_tick */

	/* Set once, before the first call passes the gate. */
	_Alignas(NVS_CACHE_LINE) unsigned number; /* the channel on the wire */
	struct nvs_device device;
	struct nvs_budget *budget; /* memory/reserve.h */
	struct nvs_swap *swap;     /* swap/swap_impl.h */
	_Atomic(void *) pool;      /* that cuMemAllocAsync takes from; NULL: ask the driver. cuda/alloc.c */
	_Atomic uint64_t unlisted; /* the latest pool whose allocations are not entered; memory/pools.c */

	/* ---- turns; guarded by nvs_client_lock, but what is atomic ---- */
	struct lease lease;
	atomic_uint changed;     /* futex: the lease or the connection changed */
	atomic_bool used;
	uint64_t request_ns;     /* when REQUEST was sent */
	uint64_t closed_ns;      /* when the gate was closed */
	uint64_t drain_ns;       /* length of the last drain */
	uint64_t grace_ns;       /* of the last REVOKE */
	uint64_t grant_calls;    /* gated calls before the grant */
	uint64_t unattached_ns;  /* since when no scheduler knows of us */
	uint64_t wanted_ns;      /* when others were last seen to want the GPU; throttle.c */
	struct nvs_waiting wait;
	struct nvs_drains drains;
	struct nvs_preemption preempt;
	struct nvs_effect_looks effect;
	struct nvs_slices slice;
	struct nvs_utilization utilization;
	struct {
		struct nvs_stats now, sent;
		uint64_t sent_ns;
	} stats;

	/* ---- work ---- */
	struct nvs_lock drain_lock; /* held while contexts are synchronised or destroyed */
	struct nvs_lock move_lock;  /* held while memory moves, or contexts are destroyed; see nvs_drain */
	atomic_bool moving;         /* it is held for memory that moves, which mostly ends by itself */
	_Atomic uint64_t load_ns;   /* since then a thread of the shim loads a module; 0: none does. swap/look.c */
	struct nvs_primary primary;
	struct nvs_lock query_lock; /* held while a stream is asked about */
	atomic_int captures;        /* open on the GPU */
	_Atomic(void *) synchronised; /* the context that a drain waits for in the driver; NULL: none */
	struct nvs_stream overflow; /* of streams beyond NVS_MAX_STREAMS */
};

extern struct nvs_gpu nvs_gpus[NVS_MAX_GPUS];
extern unsigned nvs_gpu_count; /* 0 until cuInit has succeeded */

#define NVS_FOR_EACH_GPU(gpu) \
	for (struct nvs_gpu *gpu = nvs_gpus; gpu < nvs_gpus + nvs_gpu_count; gpu++)

/* Read by every gated call, written rarely. */
struct nvs_gate {
	_Alignas(NVS_CACHE_LINE) atomic_bool active; /* false: every call passes */
	atomic_bool single;       /* one GPU in this process: nvs_gpus[0] */
	atomic_uint generation;   /* of what threads remember; grows if it may not hold */
	atomic_int captures;      /* open stream captures in the process */
};

extern struct nvs_gate nvs_gate;

static inline bool nvs_active(void)
{
	return atomic_load_explicit(&nvs_gate.active, memory_order_acquire);
}

/* Ends what nvs_gate.active stands for: every call passes from now on. */
void nvs_gate_stop(void);

extern atomic_bool nvs_exiting;  /* the process ends */
extern uint64_t nvs_exiting_ns;  /* since then */

/* Begins with these GPUs, gates closed. nvs_client_lock is held. */
void nvs_gpus_start(const struct nvs_device *devices, unsigned count);

/* After fork: no GPU is known, and the gates of those that were are open. */
void nvs_gpus_fork_child(void);

/* NULL: none of the process. */
struct nvs_gpu *nvs_gpu_of_device(int dev); /* CUdevice */
struct nvs_gpu *nvs_gpu_of_uuid(const uint8_t *uuid);

/* Slots of no scheduler: an open gate, and a closed one. */
extern const struct nvs_slot nvs_free_slot, nvs_closed_slot;

/* The word of the page that the GPU's gate looks at. */
static inline uint32_t nvs_gpu_word(struct nvs_gpu *gpu)
{
	const struct nvs_slot *slot = atomic_load_explicit(&gpu->slot, memory_order_acquire);

	return __atomic_load_n(&slot->word, __ATOMIC_SEQ_CST);
}

/* Means something only while this thread's flag for the GPU is up. */
static inline bool nvs_gate_is_open(struct nvs_gpu *gpu)
{
	return nvs_gpu_word(gpu) == atomic_load_explicit(&gpu->epoch, memory_order_seq_cst);
}

#endif
