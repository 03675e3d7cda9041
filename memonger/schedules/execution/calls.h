/* Operators of MXNet, invoked one after the other; see calls.py. */
#pragma once

#include "support/kernels.h"

/* Invokes calls [first, stop) by MXNet's C functions, which are given by their addresses.
 *
 * A call is ``CALL`` numbers of ``calls``: the operator, addresses of what MXImperativeInvoke takes,
 * and its token. They run in bulks of at most ``size`` calls with the same token. That is the number
 * of a call with which the bulk begins; all tokens change the same array, so that bulks run one
 * after the other. Returns -1, or the place of the call that failed.
 */
KERNEL int64_t run_calls(
    int64_t invoke, int64_t set_bulk_size, Int64s calls, int64_t first, int64_t stop,
    int64_t size);
