// SPDX-License-Identifier: Apache-2.0
/*
 * shared.h: the part of the simulated GPU that all processes share.
 *
 * Lives in $NVSHARE_SIMGPU_DIR (default /run/nvshare-simgpu), which containers
 * get by bind mount:
 *
 *   config  text, read once when state is made: gpus=N memory_mib=M log_records=K
 *   state   struct sim_state, mapped by every process
 *   log     struct sim_log and its records, a ring
 *
 * Promises:
 * - Crash consistent. A process may die by SIGKILL at any instruction and
 *   nothing has to be repaired: totals are sums over slots, a slot counts from
 *   the store of its `used` word, a record from the store of `next`.
 * - The lock is flock(2) on the state file and a slot's liveness is a POSIX
 *   record lock. The kernel drops both with the process. (A robust mutex would
 *   not do: its owner is a thread id, and ids repeat across pid namespaces.)
 * - Work of a dead process does not exist: its tails are dropped, its memory
 *   is free, and the log says when (SIM_EXIT): before the next piece of work on
 *   a GPU it still had work on, else within 100 ms of somebody else's work.
 */
#ifndef SIMGPU_SHARED_H
#define SIMGPU_SHARED_H

#include <stdint.h>

#define SIM_DIR_ENV     "NVSHARE_SIMGPU_DIR"
#define SIM_DIR_DEFAULT "/run/nvshare-simgpu"
#define SIM_TENANT_ENV  "NVSHARE_SIMGPU_TENANT"
/* What device nodes are to a real GPU: if a variable of this prefix and a GPU's
 * index is set, a process sees only the GPUs that have one. It is per GPU so
 * that CDI devices add up. CUDA_VISIBLE_DEVICES selects and orders among them. */
#define SIM_NODE_ENV "NVSHARE_SIMGPU_GPU_"

#define SIM_STATE_MAGIC 0x3155504753564e00ull /* "\0NVSGPU1" */
#define SIM_LOG_MAGIC   0x31474c5355474d53ull
#define SIM_MAX_GPUS    36 /* more than the shim arbitrates */
#define SIM_MAX_SLOTS   1024 /* processes at a time */

/*
 * Each copy engine does one thing at a time, for all processes together, in the
 * order in which it was submitted. The compute engine is shared by time slices:
 * the processes that have work take turns, each for its slice, and a turn of
 * another process than the last costs SIM_SWITCH_NS. Compute work of a process
 * therefore has its times on a clock of the process (struct sim_slot_gpu): that
 * stands still while the process has work and is not served, and shows the time
 * of day while there is none. Processes of one MPS group are one for that: they have
 * their turn together, their kernels run at the same time, as if each was small, and the
 * channels of one that are off stop all.
 */
#define SIM_SLICE_NS  2048000ull
#define SIM_SWITCH_NS 140000ull
enum sim_engine { SIM_COMPUTE, SIM_COPY_IN, SIM_COPY_OUT, SIM_ENGINES };

enum sim_kind {
	SIM_KERNEL = 1,
	SIM_HTOD = 2,
	SIM_DTOH = 3,
	SIM_DTOD = 4, /* and memsets */
	SIM_KINDS,
	SIM_MARK = 63,  /* an event, of which the channels tell: no work, and not in the log */
	SIM_START = 64, /* a process took a slot (cuInit) */
	SIM_EXIT = 65,  /* it left, or was found dead: work past this time never ran */
};

/* From `v` of a process's clock on, which was `t` of the day, both went on. */
struct sim_segment {
	uint64_t v, t;
};
#define SIM_SEGMENTS 64 /* the last ones */

struct sim_slot_gpu {
	uint64_t tail[SIM_ENGINES];  /* ns: end of the last work submitted; compute: by the process's clock */
	uint64_t v;                  /* the process's clock, while that has work, v < tail[SIM_COMPUTE] */
	uint64_t gap_from, gap_to;   /* of that clock: no work between */
	uint64_t slice;              /* ns; 0: SIM_SLICE_NS */
	uint64_t ran;                /* ns that the compute engine worked for it */
	uint32_t off;                /* its compute channels are off */
	uint32_t times_on;           /* how often they were put on */
	uint32_t segments;           /* ever begun */
	uint32_t held_back;          /* pieces of compute work submitted while they were off */
	struct sim_segment segment[SIM_SEGMENTS];
	uint64_t memory;             /* bytes allocated */
	uint64_t last_log[SIM_KINDS]; /* log position + 1 of the last record, 0 none */
	uint32_t contexts;
	uint32_t held_marks;         /* ns of SIM_MARK submitted while they were off */
};

struct sim_slot {
	uint32_t used;
	uint32_t generation;
	uint32_t pid;       /* in the process's own pid namespace */
	uint32_t group;     /* of an MPS server: its members' kernels run at the same time; 0: none */
	uint64_t pid_ns;    /* inode of that namespace, 0 unknown; used again after its end */
	uint64_t started;   /* clock ticks since boot, 0 unknown */
	char tenant[20];
	char comm[20];
	struct sim_slot_gpu gpu[SIM_MAX_GPUS];
	uint32_t process;   /* CUprocessState; a futex */
	uint32_t managed;   /* allocations of managed memory that live */
	uint32_t exchanged; /* memory of others that it has, or of its own that it gave away */
	uint32_t uid;       /* of the user that it runs as */
	uint32_t at[SIM_MAX_GPUS];   /* where the GPU is that it knows by this index */
	struct sim_kept {            /* what it had on a GPU when it was checkpointed */
		uint64_t memory;
		uint32_t contexts;
	} kept[SIM_MAX_GPUS];
};

struct sim_gpu { /* the compute engine */
	uint64_t at;         /* the time up to which all clocks are right */
	uint64_t slice_left, switch_left;
	int32_t serves;      /* slot, the last one that was served; -1 none */
	uint32_t generation; /* of that slot */
};

struct sim_state {
	uint64_t magic; /* stored last */
	uint32_t gpus;
	uint32_t log_records;
	uint64_t memory; /* bytes, each GPU */
	uint64_t swept;  /* ns: when somebody last looked for dead processes */
	uint32_t high;   /* no slot at or above it is used */
	uint32_t reserved;
	struct sim_gpu gpu[SIM_MAX_GPUS];
	struct sim_slot slot[SIM_MAX_SLOTS];
};

/*
 * One piece of work, or several of one process and kind that follow each
 * other without a gap (submitted before the one before ended) within 10 ms.
 * The process occupies its GPU from submit_ns to end_ns. All CLOCK_MONOTONIC. When
 * channels go off the records end, and when they are on again one of the rest begins.
 */
struct sim_record {
	uint64_t submit_ns, start_ns, end_ns;
	uint32_t pid;
	uint32_t generation; /* slot and generation name a process */
	uint32_t busy_ns;    /* sum of durations; 0: end - start */
	uint32_t count;
	uint16_t slot;
	uint8_t gpu;
	uint8_t kind;
	char tenant[20];
};

struct sim_log {
	uint64_t magic;
	uint64_t capacity; /* records in the ring */
	uint64_t next;     /* records ever written */
	uint64_t reserved[5];
	struct sim_record record[];
};

_Static_assert(sizeof(struct sim_record) == 64, "record is 64 bytes");
_Static_assert(sizeof(struct sim_log) == 64, "log header is 64 bytes");

uint64_t sim_now(void); /* CLOCK_MONOTONIC, ns */

/*
 * A process knows a GPU by the index that it had when the process began. After a restore
 * on another GPU (checkpoint.c) the same index means that one. All functions here take
 * the index that the process knows; for a process without a slot both are the same.
 */
int sim_at(int gpu);
/* Waits until this process is neither locked nor checkpointed. */
void sim_await_running(void);
#define SIM_PROCESS_FAILED 3u /* CU_PROCESS_STATE_FAILED */
int sim_process_failed(void);
/* Counts managed memory, and memory that other processes have too. */
void sim_count_managed(int delta);
void sim_count_exchanged(int delta);

/* Maps the shared state, making it if need be. 0, or -1 with a line on stderr. */
int sim_open(void);
void sim_close(void); /* nobody may use the state any more */
const char *sim_state_dir(void); /* the directory of the shared state */
/* Opens a file in it; O_CREAT makes it for all users. */
int sim_open_file(const char *name, int flags);
/* Takes a slot for this process, of a group or 0. 0 or -1 with a line on stderr. */
int sim_join(uint32_t group);
/* Gives the slot back; pending work of this process is dropped. */
void sim_leave(void);
/* Before and after fork in the parent: keeps the lock out of the child. */
void sim_fork_prepare(void);
void sim_fork_parent(void);
/* In the child: the slot stays the parent's. */
void sim_fork_child(void);

int sim_gpus(void);
uint64_t sim_memory(void);

/* A time of day, or of this process's clock on a GPU. */
struct sim_time {
	uint64_t ns;
	int clock; /* 0: of day; 1 + GPU */
};

/*
 * Queues `ns` of work on an engine, not before `after`. Returns its end and
 * stores its start, of the same clock.
 */
struct sim_time sim_submit(int gpu, int engine, int kind, struct sim_time after, uint64_t ns, uint64_t *start);

uint64_t sim_clock(int clock);              /* what it shows */
uint64_t sim_day(struct sim_time t, int end); /* the time of day at which it was; end: of what ended then */
struct sim_time sim_later(struct sim_time a, struct sim_time b); /* of the day, or of one GPU */
uint64_t sim_soonest(struct sim_time t);    /* the time of day to look again: it is not before that */
/* The longest time that the clock stood still between two of its times, and when that began. */
uint64_t sim_still(struct sim_time from, uint64_t to, uint64_t *began);

/* Channels of this process off and on, and its slice; 0: the default. */
void sim_set_off(int gpu, int off);
int sim_is_off(int gpu, uint32_t *times_on);
void sim_set_slice(int gpu, uint64_t ns);

/* Charges bytes of device memory. 0, or -1 when the GPU has not that much. */
int sim_charge(int gpu, uint64_t bytes);
void sim_uncharge(int gpu, uint64_t bytes);
uint64_t sim_used(int gpu); /* bytes, all live processes */
void sim_count_context(int gpu, int delta);

/* For NVML: one live process that uses a GPU; pid as this process sees it. */
struct sim_user {
	uint32_t pid;
	uint64_t memory;
	uint64_t process; /* names it, in this state */
	uint64_t ran;     /* ns that the compute engine worked for it */
};
/* Stores up to n users of a GPU, returns how many there are. */
int sim_users(int gpu, struct sim_user *out, int n);
/* 1 while an engine of the class has work, else 0. */
int sim_busy(int gpu);

/* Text of a GPU's UUID ("GPU-5160..."), 41 bytes with the NUL, and raw. */
void sim_uuid_text(int gpu, char out[41]);
void sim_uuid_raw(int gpu, unsigned char out[16]);
/* GPUs this process sees, after SIM_NODE_ENV: fills index[], returns n. */
int sim_nodes(int index[SIM_MAX_GPUS]);
/* Those of from[] that a list like CUDA_VISIBLE_DEVICES selects; NULL: all. */
int sim_visible(const char *list, const int *from, int nfrom, int index[SIM_MAX_GPUS]);

#endif
