/*
 * wire.h: the protocol between libnvshare.so (client) and nvshare-scheduler.
 *
 * This file is the one definition of frames and pages. The Go side
 * (sched/wire) is checked against golden frames that a C program prints from
 * these structures (tests/golden).
 *
 * Transport: an AF_UNIX SOCK_SEQPACKET socket; one packet is one frame of
 * exactly 64 bytes, little endian. A packet of any other length, an unknown
 * version or type, or a frame out of order closes the connection. One
 * connection serves one process; each GPU the process uses is a channel of it.
 *
 *   client                                  scheduler
 *     REGISTER ------------------------------>
 *     <------------- WELCOME + grant page (SCM_RIGHTS)     | or REFUSED, close
 *     ATTACH(channel, UUID, held epoch) ----->
 *     <------------- ATTACHED(channel, status)
 *     REQUEST(channel) ---------------------->
 *     <------------- GRANT(channel, epoch)      page word := epoch, futex wake
 *     <------------- REVOKE(channel, epoch)     page word := 0 first
 *     RELEASE(channel, epoch) --------------->  only when drained, or with its channels off
 *     RESERVE(channel, total, least) -------->  before memory is allocated
 *     <------------- RESERVED(channel, total)   or an error, total unchanged
 *
 * Where memory is swapped (the slot's room is not 0), besides:
 *
 *     <------------- ARENA(channel, segment) + memory (SCM_RIGHTS)
 *     <------------- ROOM(channel, bytes)       move out until resident <= room
 *     MOVED(channel, resident, away, ...) --->  on the way, and at the end
 *     <------------- GRANT(channel, epoch)      as above; the client moves in first
 *     MOVED(channel, READY, epoch) ---------->  all is there, its gate opens
 *
 * And where the process leaves the GPU with its context:
 *
 *     <------------- SUSPEND(PREPARE)
 *     SUSPENDED(READY) ---------------------->  the driver checkpoints the process
 *     SUSPENDED(WAKE) ----------------------->  a call; the driver restores it
 *     <------------- SUSPEND(OVER)
 *
 * The grant page, not the GRANT frame, opens the gate: a thread may submit
 * work to a GPU while the channel's word equals the epoch this client holds.
 * Frames wake the client thread and carry what it has to do.
 *
 * In a code that has flags, the upper half is for those that a peer may ignore
 * if it does not know them. One of the lower half changes what the frame means:
 * the scheduler refuses it if it is unknown, so a client sends it only to a
 * scheduler that has shown that it knows it.
 *
 * Identity never travels in a frame: the scheduler takes it from the kernel
 * (SO_PEERCRED, a pidfd, the cgroup).
 */
#ifndef NVSHARE_WIRE_H
#define NVSHARE_WIRE_H

#include <stddef.h>
#include <stdint.h>

#define NVS_WIRE_VERSION   1
#define NVS_FRAME_SIZE     64
#define NVS_PAGE_SIZE      4096
#define NVS_PAGE_MAGIC     0x5053564eu /* "NVSP" */
#define NVS_MAX_CHANNELS   32
#define NVS_UUID_SIZE      16

/* Names below the run directory ($NVSHARE_RUN_DIR, default below). */
#define NVS_RUN_DIR_ENV     "NVSHARE_RUN_DIR"
#define NVS_RUN_DIR_DEFAULT "/var/run/nvshare"
#define NVS_SOCKET_NAME     "scheduler.sock"

/*
 * Words of a channel in the grant page, which the low 32 bits of an epoch never are. A client whose
 * gate is closed compares with NVS_WORD_NONE, which no page ever holds.
 */
#define NVS_WORD_CLOSED 0u
#define NVS_WORD_NONE   0xffffffffu

enum nvs_type {
	/* client to scheduler */
	NVS_REGISTER = 1, /* first frame of a connection */
	NVS_ATTACH   = 2, /* this process uses a GPU; epoch: still held, or 0 */
	NVS_REQUEST  = 3, /* a thread waits at the gate; idempotent */
	NVS_RELEASE  = 4, /* epoch is drained and given back; code: enum nvs_release */
	NVS_STATS    = 5, /* counters of a channel, at most once a second */
	NVS_RESERVE  = 6, /* code: enum nvs_reserve_flags; an attached channel */
	NVS_MOVED    = 8, /* code: enum nvs_moved_flags; epoch: of the grant in hand, or 0 */
	NVS_UTIL     = 9, /* samples of whether the GPU had work; see struct nvs_util */
	NVS_CONTROLS = 10, /* what the process may ask of the GPU's own scheduler; see struct nvs_controls */
	NVS_SUSPENDED = 11, /* code: enum nvs_suspended; of the process, channel 0; to the one that sent SUSPEND */
	/* scheduler to client */
	NVS_WELCOME  = 65, /* carries the grant page's descriptor */
	NVS_ATTACHED = 66, /* code: enum nvs_error, 0 for success */
	NVS_GRANT    = 67, /* code: enum nvs_grant_flags */
	NVS_REVOKE   = 68, /* close the gate, drain, release within grace_ns; code: enum nvs_revoke_flags */
	NVS_NOTICE   = 69, /* waiters or present changed between zero and more */
	NVS_REFUSED  = 70, /* code: enum nvs_error; the connection is closed next */
	NVS_RESERVED = 71, /* answers each RESERVE; code: NVS_OK, NVS_ERR_MEMORY or NVS_ERR_ARENA */
	NVS_ROOM     = 72, /* the slot's room has changed */
	NVS_ARENA    = 73, /* carries a segment of host memory for what is away */
	NVS_SLICE    = 74, /* the GPU's own time slice of this client; needs NVS_REGISTER_SLICES */
	NVS_SUSPEND  = 75, /* code: enum nvs_suspend; of the process, channel 0; needs NVS_REGISTER_SUSPEND */
	/* 76 is reserved: COPIER, which an older shim understands */
};

enum nvs_register_flags {
	NVS_REGISTER_RECONNECT = 1u << 0, /* this process was registered before */
	NVS_REGISTER_SWAP      = 1u << 16, /* it can move memory; see struct nvs_moved */
	NVS_REGISTER_SLICES    = 1u << 17, /* it understands SLICE */
	NVS_REGISTER_SUSPEND   = 1u << 18, /* it understands SUSPEND, and sees each call of the driver */
	NVS_REGISTER_AWAY      = 1u << 19, /* it has sent SUSPENDED (READY), or may, and waits for SUSPEND (OVER) */
	/* 1u << 20 is reserved: an older shim sets it, for COPIER */
};

/*
 * A process leaves the GPU with its context: the scheduler asks it to keep out of the
 * driver, has the driver checkpoint it, and says when it is restored.
 */
enum nvs_suspend {
	NVS_SUSPEND_PREPARE = 1, /* new driver calls wait from now on; answer SUSPENDED (READY) or (BUSY) */
	NVS_SUSPEND_OVER    = 2, /* driver calls go on; also as the answer to (BUSY) */
};

enum nvs_suspended {
	NVS_SUSPENDED_READY = 1, /* no thread is in the driver, or comes there */
	NVS_SUSPENDED_BUSY  = 2, /* one is, or waits to be; SUSPEND is as if it had not come */
	NVS_SUSPENDED_WAKE  = 3, /* after READY: a thread waits for the driver; repeated each second */
};

enum nvs_attach_flags {
	NVS_ATTACH_WANT = 1u << 0, /* a thread already waits: counts as REQUEST */
	/*
	 * Only asks for the container's limits of this GPU: the page's slot has them when ATTACHED
	 * comes, and no later change. The process is no client of it. For programs that ask NVML.
	 */
	NVS_ATTACH_OBSERVE = 1u << 1,
	/*
	 * With OBSERVE: ATTACHED says on which GPU the container is, if it may move. A UUID of zeros: the
	 * process does not know on which GPU the container began.
	 */
	NVS_ATTACH_PLACE = 1u << 16,
	/* Work is left of an earlier grant, and off the GPU. Nothing of the process can move before it is done. */
	NVS_ATTACH_CUT = 1u << 17,
};

enum nvs_reserve_flags {
	/* The memory exists already: always granted, also over the limit. */
	NVS_RESERVE_FORCE = 1u << 0,
};

enum nvs_moved_flags {
	NVS_MOVED_READY = 1u << 0, /* nothing is away: the gate of `epoch` opens now */
	NVS_MOVED_STUCK = 1u << 1, /* it cannot go on by itself; with a reason */
	/*
	 * From this bit on, NVS_ROOM_SEQ_MAX: the page's room_seq before the client counted what it says here. 0:
	 * it does not say, and has more on the GPU than it said last only under a grant.
	 */
	NVS_MOVED_SEEN = 1u << 4,
	/* Reasons of STUCK; it tries again by itself all the same. */
	NVS_MOVED_NO_MEMORY = 1u << 16, /* the driver refuses memory that room promises */
	NVS_MOVED_NO_ARENA  = 1u << 17, /* no host memory for what has to go out */
	NVS_MOVED_ERROR     = 1u << 18, /* the driver fails otherwise; the rest is not movable */
	/* 1u << 19 is reserved: an older shim sets it, after COPIER */
	/* Where nothing of the process can be moved: an enum nvs_fixed, from this bit on. */
	NVS_MOVED_FIXED_BY  = 1u << 24,
};

/* Why nothing of a process's memory can be moved. A scheduler may not know a value. */
enum nvs_fixed {
	NVS_FIXED_NOT          = 0, /* some can be moved, or the reason is another one */
	NVS_FIXED_SEVERAL_GPUS = 1, /* the process uses several GPUs */
	/* What the process has mapped uses its memory without the driver functions that the shim sees. */
	NVS_FIXED_OPTIX        = 2,
	NVS_FIXED_ENCODER      = 3, /* NVENC */
	NVS_FIXED_DECODER      = 4, /* NVDEC */
	NVS_FIXED_OPTICAL_FLOW = 5,
	NVS_FIXED_STORAGE      = 6, /* GPUDirect Storage, of cuFile */
	NVS_FIXED_RDMA         = 7,
	NVS_FIXED_LAST         = 15,
};

enum nvs_release {
	NVS_RELEASE_REVOKED = 1, /* answer to REVOKE */
	NVS_RELEASE_IDLE    = 2, /* early release: somebody waits, nothing to do */
	NVS_RELEASE_EXIT    = 3, /* the process leaves in good order */
};

enum nvs_revoke_flags {
	/*
	 * A member of a gang that has drained already, under a new epoch that no GRANT had: others
	 * may wait for its next call. If a thread waits at the gate, or comes within NVS_STEP_NS,
	 * one call of one thread passes; the gate stays closed. Then, as always: drain, RELEASE.
	 */
	NVS_REVOKE_STEP = 1u << 16,
};

#define NVS_STEP_NS 20000000u

#define NVS_ROOM_SEQ_MAX 0xfffu

enum nvs_grant_flags {
	/* Anti-thrash mode is off: others may hold the GPU at the same time. */
	NVS_GRANT_CONCURRENT = 1u << 0,
	/*
	 * In the page only: this client is next and the holder drains. A waiting thread may spin for
	 * the grant, for at most NVS_SPIN_NS: waking it takes longer than the rest of the hand-over.
	 */
	NVS_GRANT_NEXT       = 1u << 1,
	/*
	 * In the page only: others are kept from the GPU as long as this client has it, so it gives
	 * the GPU back within NVS_LATENCY_IDLE_NS of having nothing to do.
	 */
	NVS_GRANT_LATENCY    = 1u << 2,
	/*
	 * In the page only, while there is no grant: a call that finds the gate shut asks for a
	 * grant as ever, and goes ahead. The scheduler would let this client in at once, and keeps
	 * others out when it hears of it.
	 */
	NVS_GRANT_STANDING   = 1u << 3,
	/*
	 * In the page only: others may hold the GPU in the same turn, by time slices, so the client
	 * sends UTIL although nobody waits for it.
	 */
	NVS_GRANT_SHARED     = 1u << 4,
	/* In the page only: how memory is kept. Neither: swapped where the slot's room is not 0. */
	NVS_SLOT_RESIDENT    = 1u << 8, /* never moved; room is always what is reserved */
	NVS_SLOT_MANAGED     = 1u << 9, /* managed memory, the driver's page faults */
	/*
	 * In the page only: a client that waits would have to move memory first, and this one has
	 * many short pauses: it gives the GPU back after NVS_PATIENT_IDLE_NS without work.
	 */
	NVS_SLOT_PATIENT     = 1u << 10,
	/*
	 * In the page only, where memory is swapped: all that is promised of the GPU fits there, so no
	 * memory has to leave for others. Memory is had at once, up to the slot's room, also without a grant. A client
	 * is asked for no room before work that a cut drain has left is done.
	 */
	NVS_SLOT_STILL       = 1u << 11,
};

#define NVS_PATIENT_IDLE_NS 20000000u

#define NVS_LATENCY_IDLE_NS 200000u

#define NVS_SPIN_NS 8000000u

enum nvs_error {
	NVS_OK                = 0,
	NVS_ERR_VERSION       = 1, /* no common protocol version */
	NVS_ERR_UNKNOWN_GPU   = 2, /* no such GPU UUID on this node */
	NVS_ERR_CHANNEL       = 3, /* channel out of range or attached twice */
	NVS_ERR_TOO_MANY      = 4, /* a limit of clients or connections is reached */
	NVS_ERR_PROTOCOL      = 5, /* malformed or out of order */
	NVS_ERR_INTERNAL      = 6,
	NVS_ERR_MEMORY        = 7, /* over the container's memory limit */
	NVS_ERR_ARENA         = 8, /* neither the GPU nor the arena has room for it */
};

struct nvs_register {
	uint16_t min_version; /* oldest version the client speaks; header: newest */
	uint16_t channels;    /* GPUs the process sees, 1..NVS_MAX_CHANNELS */
	uint32_t shim_version; /* major << 16 | minor << 8 | patch */
	uint32_t interposed;  /* self-proof: entry points that lead to the shim */
	uint32_t bypassed;    /* self-proof: entry points that do not */
	uint8_t  reserved[32];
};

struct nvs_attach {
	uint8_t  uuid[NVS_UUID_SIZE]; /* as cuDeviceGetUuid returns it */
	uint32_t ordinal;             /* the application's device ordinal */
	uint32_t reserved0;
	uint64_t total_mem;           /* bytes, from the real cuDeviceTotalMem */
	uint8_t  reserved[16];
};

struct nvs_released {
	uint64_t drain_ns; /* from closed gate to idle GPU, or to channels that are off */
	uint64_t calls;    /* gated calls under this grant */
	uint32_t flags;    /* enum nvs_released_flags; 0 without NVS_FEATURE_PREEMPT */
	uint8_t  reserved[28];
};

enum nvs_released_flags {
	/*
	 * The drain was cut: the channels are off the GPU in the middle of the work, which goes on
	 * with the next grant. So the RELEASE counts as a REQUEST too, and one follows.
	 */
	NVS_RELEASED_PREEMPTED = 1u << 0,
};

struct nvs_stats {
	uint64_t calls;      /* gated calls since attach */
	uint64_t waits;      /* times a thread waited at the gate */
	uint64_t wait_ns;    /* sum over threads */
	uint64_t mem_bytes;  /* device memory allocated now through the shim */
	uint64_t mem_peak;   /* bytes */
	uint64_t wait_max_ns;
};

/*
 * Device memory that this process wants to have reserved on the GPU, in all, so that a repeated or
 * lost frame does no harm. Granted is `total`, or what is left of the limit if that is at least
 * `least`, else nothing changes. Lowering is always granted.
 */
struct nvs_reserve {
	uint64_t total;  /* bytes */
	uint64_t least;  /* bytes, at most total */
	uint64_t serial; /* comes back in RESERVED */
	uint8_t  reserved[24];
};

struct nvs_reserved {
	uint64_t total;  /* bytes this process has reserved now */
	uint64_t used;   /* bytes its container has, all processes */
	uint64_t limit;  /* bytes, 0: none */
	uint64_t serial;
	uint8_t  reserved[16];
};

/*
 * What the client has of a GPU, sent while it moves memory, each 64 MiB or so, and at the end; else,
 * at most ten times a second, when fixed or away changes. resident + away is what is allocated.
 * After each ATTACHED the first MOVED says what was there before.
 */
struct nvs_moved {
	uint64_t resident;  /* bytes on the GPU, fixed and cached ones with them */
	uint64_t fixed;     /* of these, bytes that cannot be moved */
	uint64_t away;      /* bytes that are in the arena, or were never touched */
	uint64_t out_bytes; /* copied since the process attached first */
	uint64_t in_bytes;
	uint64_t arena;     /* bytes of arena segments that are mapped and ready */
};

/*
 * How often the GPU had work of this client, of so many looks while its gate was open and others
 * were attached, since the frame before. At most four times a second, where the page's features have
 * NVS_FEATURE_UTIL.
 */
struct nvs_util {
	uint32_t samples; /* at most NVS_UTIL_MAX */
	uint32_t busy;    /* at most samples */
	uint32_t calls;   /* gated calls since the frame before; 0 without NVS_FEATURE_CONTROLS */
	uint8_t  reserved[36];
};

#define NVS_UTIL_MAX 1000000u

enum nvs_control {
	NVS_CONTROL_UNTRIED = 0,
	NVS_CONTROL_WORKS   = 1,
	NVS_CONTROL_UNSEEN  = 2, /* no channel group of this GPU was seen */
	NVS_CONTROL_REFUSED = 3, /* the driver answers with an error */
	NVS_CONTROL_FAKED   = 4, /* the driver answers success and changes nothing */
	NVS_CONTROL_FAILED  = 5, /* the control cannot be sent */
};

/*
 * What the GPU's own scheduler lets this process do, as the shim has tried it. Sent after each
 * ATTACHED, once the process has a context, and when it changes, where the page's features have
 * NVS_FEATURE_CONTROLS.
 */
struct nvs_controls {
	uint8_t  slices;   /* enum nvs_control; WORKS: a time slice was set and read back */
	uint8_t  channels; /* enum nvs_control; WORKS: the driver took channels off and put them on */
	uint16_t groups;   /* compute channel groups that were seen */
	uint32_t bare;     /* channels in no group that was seen, on any GPU */
	char     driver[40]; /* version; NUL-terminated printable ASCII, "" unknown */
};

/* The slot's room at the time; the slot itself is what counts. */
struct nvs_room {
	uint64_t room; /* bytes */
	uint8_t  reserved[40];
};

/* A segment of the arena, zeroed, to be mapped shared and registered. It stays the client's until its end. */
struct nvs_arena {
	uint64_t segment; /* number, unique among those of this client */
	uint64_t size;    /* bytes, a multiple of 2 MiB */
	uint32_t flags;   /* enum nvs_arena_flags */
	uint32_t reserved0;
	uint8_t  reserved[24];
};

enum nvs_arena_flags {
	NVS_ARENA_HUGE = 1u << 0, /* of huge pages */
};

/*
 * The time slice that the GPU's own scheduler is to give this process, from now on; after each
 * ATTACHED it is the driver's own. A frame, because the driver has to be told by a call that may
 * wait. Nobody waits for an answer: whether slices work is in CONTROLS.
 */
struct nvs_slice {
	uint64_t slice_ns; /* 0: the driver's own */
	uint8_t  reserved[40];
};

struct nvs_attached {
	uint8_t uuid[NVS_UUID_SIZE]; /* answers PLACE; zeros: not known, or the container does not move */
	uint8_t reserved[32];
};

struct nvs_welcome {
	uint64_t client_id;
	uint32_t page_size; /* NVS_PAGE_SIZE */
	uint16_t slots;     /* NVS_MAX_CHANNELS */
	uint16_t reserved0;
	uint8_t  reserved[32];
};

struct nvs_grant {
	uint64_t quantum_ns; /* 0: unbounded */
	uint8_t  reserved[40];
};

struct nvs_revoke {
	uint64_t grace_ns; /* after it the grant is fenced */
	uint32_t waiters;
	uint32_t reserved0;
	uint8_t  reserved[32];
};

struct nvs_notice {
	uint32_t waiters; /* other clients that wait for this GPU */
	uint32_t present; /* other clients attached to this GPU */
	uint8_t  reserved[40];
};

struct nvs_refused {
	char text[48]; /* NUL-terminated UTF-8, for a debug log */
};

struct nvs_frame {
	uint8_t  version;
	uint8_t  type;    /* enum nvs_type */
	uint16_t channel; /* 0 where the type has none */
	uint32_t code;    /* flags, reason or error, by type */
	uint64_t epoch;   /* 0 where the type has none */
	union {
		struct nvs_register reg;
		struct nvs_attach   attach;
		struct nvs_released released;
		struct nvs_stats    stats;
		struct nvs_welcome  welcome;
		struct nvs_attached attached;
		struct nvs_grant    grant;
		struct nvs_revoke   revoke;
		struct nvs_notice   notice;
		struct nvs_refused  refused;
		struct nvs_reserve  reserve;
		struct nvs_reserved memory;
		struct nvs_moved    moved;
		struct nvs_util     util;
		struct nvs_controls controls;
		struct nvs_room     room;
		struct nvs_arena    arena;
		struct nvs_slice    slice;
		uint8_t             raw[48];
	} u;
};

/*
 * The grant page: a sealed memfd of the scheduler, one per client, mapped read-only by it. word is a
 * futex: the scheduler wakes all waiters after each change. Other fields are hints.
 *
 * Under a grant that is not revoked the word may be NVS_WORD_CLOSED for a moment, without a frame,
 * while a latency client is on the GPU. What was submitted goes on.
 *
 * A scheduler that keeps account of memory stores the limits before it sends ATTACHED. If limit_seq
 * is still 0 then, it does not know RESERVE, and is not to be sent one.
 */
struct nvs_slot {
	uint32_t word;       /* NVS_WORD_CLOSED, or the low 32 bits of the epoch */
	uint32_t flags;      /* enum nvs_grant_flags of the grant */
	uint32_t waiters;    /* other clients that wait for this GPU */
	uint32_t present;    /* other clients attached to this GPU */
	uint64_t quantum_ns; /* of the current grant */
	uint64_t granted_ns; /* CLOCK_MONOTONIC of the grant */
	uint32_t limit_seq;  /* sequence lock over the next three: odd while written */
	uint32_t core_limit; /* percent, 0: none */
	uint64_t mem_limit;  /* bytes for the container, 0: none */
	uint64_t mem_used;   /* bytes its processes have reserved */
	/*
	 * Bytes this client may have resident; 0: nothing is swapped here. Stored before ATTACHED is
	 * sent, one 64-bit store; after a change word is woken.
	 */
	uint64_t room;
};

enum nvs_features {
	NVS_FEATURE_UTIL     = 1u << 0, /* UTIL */
	NVS_FEATURE_CONTROLS = 1u << 1, /* CONTROLS, and the calls of UTIL */
	NVS_FEATURE_PREEMPT  = 1u << 2, /* the flags of RELEASE */
};

struct nvs_page {
	uint32_t magic;   /* NVS_PAGE_MAGIC */
	uint16_t version; /* NVS_WIRE_VERSION */
	uint16_t slots;   /* NVS_MAX_CHANNELS */
	uint64_t client_id;
	uint32_t features; /* enum nvs_features: what this scheduler understands */
	uint32_t reserved0;
	uint64_t reserved[5];
	struct nvs_slot slot[NVS_MAX_CHANNELS];
	/* Which of its rooms each slot has, from 1 to NVS_ROOM_SEQ_MAX and again; stored after it. 0: not told. */
	uint32_t room_seq[NVS_MAX_CHANNELS];
};

_Static_assert(sizeof(struct nvs_frame) == NVS_FRAME_SIZE, "frame is 64 bytes");
_Static_assert(offsetof(struct nvs_frame, channel) == 2, "frame.channel");
_Static_assert(offsetof(struct nvs_frame, code) == 4, "frame.code");
_Static_assert(offsetof(struct nvs_frame, epoch) == 8, "frame.epoch");
_Static_assert(offsetof(struct nvs_frame, u) == 16, "frame payload");
#define NVS_PAYLOADS(P) \
	P(register) P(attach) P(released) P(stats) P(welcome) P(attached) P(grant) P(revoke) \
	P(notice) P(refused) P(reserve) P(reserved) P(moved) P(room) P(util) P(slice) P(controls) \
	P(arena)
#define P(name) _Static_assert(sizeof(struct nvs_##name) == 48, #name);
NVS_PAYLOADS(P)
#undef P
_Static_assert(sizeof(struct nvs_slot) == 64, "one cache line a slot");
_Static_assert(offsetof(struct nvs_slot, limit_seq) == 32, "slot.limit_seq");
_Static_assert(offsetof(struct nvs_slot, mem_limit) == 40, "slot.mem_limit");
_Static_assert(offsetof(struct nvs_slot, mem_used) == 48, "slot.mem_used");
_Static_assert(offsetof(struct nvs_page, slot) == 64, "slots follow the header");
_Static_assert(offsetof(struct nvs_slot, room) == 56, "slot.room");
_Static_assert(offsetof(struct nvs_page, features) == 16, "page.features");
_Static_assert(sizeof(struct nvs_page) <= NVS_PAGE_SIZE, "page fits");

#endif
