// SPDX-License-Identifier: Apache-2.0

// Package account bills tenants for their time on one GPU. It is pure arithmetic. The account of a
// tenant has three parts:
//
// Virtual time is time on the GPU, divided by the tenant's part of it. The tenant that is behind is
// granted first. One that wants nothing falls behind by one turn at most.
//
// Credit, of a tenant with a limit, fills with the limit's part and is emptied by use. Without credit
// its grants are revoked, until there is enough for a slice. Less than none is a debt.
//
// Patience is for how long a latency tenant may still have the GPU while others want it: its own, and
// a common one. A tenant without both waits until one of them is half full, or nobody else wants the GPU.
//
// What is billed does not depend on how often Bill is called. No time is billed twice, or saved up
// beyond a slice, a window of Tuning, or PatienceMax. Nothing overflows. CreditEnds and PatienceEnds say
// when an account comes to its end if the rates stay: Bill finds nothing left then.
package account
