// SPDX-License-Identifier: Apache-2.0

// Package account bills tenants for their time on one GPU. It is pure arithmetic: rates go in, and
// it reads no clock. The account of a tenant has three parts:
//
// Virtual time: time on the GPU, divided by the tenant's part of the GPU. The tenant
// that is behind is granted first, so that all get their parts. A tenant that wants
// nothing falls behind by one turn at most: idle time is not saved up.
//
// Credit: for a tenant with a limit, time that fills with the limit's part and is
// emptied by use. When nothing is left the tenant's grants are revoked, and it waits
// until there is enough for a slice. Credit may become negative, because a drain
// takes time, and a kernel's length where it can't be cut: that is the tenant's debt.
//
// Patience: for how long a latency tenant may still have the GPU while others want it.
// Each has its own, which fills with its part of what latency tenants may have together,
// and all have a common one, which whoever wants the GPU may use. A tenant is out of
// patience when both are empty, and waits until one of them is half full, or nobody else
// wants the GPU. Both may become negative, as credit may.
//
// # Guarantees
//
// What is billed does not depend on how often Bill is called, but for nanoseconds that are rounded
// down. No time is billed twice, or saved up beyond a slice, a window of Tuning, or PatienceMax. Nothing
// overflows, whatever is billed for however long: sums stay at what fits, and debts at a day. CreditEnds and
// PatienceEnds say when an account comes to its end if the rates stay: Bill finds nothing left then.
//
// Dues says which part of the GPU each tenant is to have, of what all claim.
//
// Peak, Lately and Spread count what a status shows: how long was waited, and how often.
package account
