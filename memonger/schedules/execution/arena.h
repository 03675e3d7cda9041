/* Operators of MXNet, invoked one after the other; see arena.py. */
#pragma once

#include "support/kernels.h"

/* Invokes calls [first, stop) by the addresses of MXNet's C functions.
 *
 * A call is ``CALL`` numbers of ``calls``: the operator, the addresses for MXImperativeInvoke, and
 * its token. They run in bulks of at most ``size`` calls with the same token. That is the number
 * of a call with which the bulk begins; all tokens change the same array, so that bulks run one
 * after the other. Returns -1, or the place of the call that failed.
 */
KERNEL int64_t run_calls(
    int64_t invoke, int64_t set_bulk_size, Int64s calls, int64_t first, int64_t stop,
    int64_t size);
