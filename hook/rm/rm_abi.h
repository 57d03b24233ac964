// SPDX-License-Identifier: Apache-2.0
/*
 * rm_abi.h: numbers and layouts of the driver's resource manager (RM), as open-gpu-kernel-modules
 * has them (the same in every branch from 515 to 595). The file there is named beside each. An
 * NvHandle and a status have 32 bits, a pointer has 64.
 */
#ifndef NVSHARE_RM_ABI_H
#define NVSHARE_RM_ABI_H

#include <stddef.h>
#include <stdint.h>
#include <sys/ioctl.h>

/* nv-ioctl-numbers.h, nv_escape.h */
#define RM_MAGIC 'F'
#define RM_IS_REQUEST(r) (((r) >> _IOC_TYPESHIFT & _IOC_TYPEMASK) == RM_MAGIC)

struct rm_free { /* nvos.h, NVOS00 */
	uint32_t client, parent, object, status;
};

struct rm_alloc { /* nvos.h, NVOS21; and the beginning of NVOS64 */
	uint32_t client, parent, object, class;
	uint64_t params;
	uint32_t params_size, status;
};

struct rm_alloc_rights { /* nvos.h, NVOS64 */
	uint32_t client, parent, object, class;
	uint64_t params, rights;
	uint32_t params_size, flags, status;
};
#define RM_ALLOC_SERIALIZED 1u /* in flags: params are not the class's structure */

struct rm_control { /* nvos.h, NVOS54 */
	uint32_t client, object, command, flags;
	uint64_t params;
	uint32_t params_size, status;
};

struct rm_version { /* nv-ioctl.h, nv_ioctl_rm_api_version_t */
	uint32_t command, reply;
	char text[64];
};

_Static_assert(sizeof(struct rm_free) == 16, "NVOS00");
_Static_assert(sizeof(struct rm_alloc) == 32, "NVOS21");
_Static_assert(sizeof(struct rm_alloc_rights) == 48, "NVOS64");
_Static_assert(sizeof(struct rm_control) == 32, "NVOS54");
_Static_assert(sizeof(struct rm_version) == 72, "nv_ioctl_rm_api_version_t");

#define RM_FREE         _IOWR(RM_MAGIC, 0x29, struct rm_free)
#define RM_CONTROL      _IOWR(RM_MAGIC, 0x2a, struct rm_control)
#define RM_ALLOC        _IOWR(RM_MAGIC, 0x2b, struct rm_alloc)
#define RM_ALLOC_RIGHTS _IOWR(RM_MAGIC, 0x2b, struct rm_alloc_rights)
#define RM_VERSION      _IOWR(RM_MAGIC, 210, struct rm_version)

/* Classes: cl0080.h, cl2080.h, cla06c.h, and cl..6f.h of each generation of GPUs */
#define RM_CLASS_DEVICE     0x0080u
#define RM_CLASS_SUBDEVICE  0x2080u
#define RM_CLASS_GROUP      0xa06cu
#define RM_IS_CHANNEL(class) ((class) <= 0xffff && ((class) & 0xff) == 0x6f)

struct rm_group_params { /* nvos.h, NV_CHANNEL_GROUP_ALLOCATION_PARAMETERS: its beginning */
	uint32_t error, ecc_error, address_space, engine;
};
/* cl2080.h: 1 to 8 are graphics and compute, each of which but the first needs MIG; copies begin at 9. */
#define RM_IS_COMPUTE(engine) ((engine) >= 1 && (engine) <= 8)

/* ctrla06c.h */
#define RM_SET_SLICE 0xa06c0103u
#define RM_GET_SLICE 0xa06c0104u

struct rm_slice {
	uint64_t us;
};

/* ctrl2080fifo.h */
#define RM_CHANNELS     0x2080110bu
#define RM_CHANNELS_MAX 64u

struct rm_channels {
	uint8_t disable;
	uint32_t count;
	uint8_t only_scheduling; /* 1: what runs is not taken off */
	uint8_t rewind;
	uint64_t event; /* for the kernel only: 0 */
	uint32_t client[RM_CHANNELS_MAX], channel[RM_CHANNELS_MAX];
};

_Static_assert(offsetof(struct rm_channels, event) == 16, "NV2080_CTRL_FIFO_DISABLE_CHANNELS_PARAMS");
_Static_assert(sizeof(struct rm_channels) == 536, "NV2080_CTRL_FIFO_DISABLE_CHANNELS_PARAMS");

/* ctrl2080gpu.h */
#define RM_GET_UUID    0x2080014au
#define RM_UUID_BINARY 2u /* flags: 16 bytes, not text */

struct rm_uuid {
	uint32_t index, flags, length;
	uint8_t data[256];
};

_Static_assert(sizeof(struct rm_uuid) == 268, "NV2080_CTRL_GPU_GET_GID_INFO_PARAMS");

/* nvstatuscodes.h */
#define RM_NOT_PERMITTED 0x1bu
#define RM_BAD_OBJECT    0x31u
#define RM_BAD_HANDLE    0x33u
#define RM_NO_OBJECT     0x57u
#define RM_NOT_SUPPORTED 0x56u

#endif
