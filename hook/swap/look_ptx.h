/* SPDX-License-Identifier: Apache-2.0 */
/* look_ptx.h: the text of the kernel of look_abi.h. */
#ifndef NVSHARE_LOOK_PTX_H
#define NVSHARE_LOOK_PTX_H

extern const char nvs_look_ptx[];

#endif
