// The discretizations: from a step Δ and a pole A to h[t] = abar·h[t-1] + bbar·B·u.
//
// With x = Δ·A every method has abar = a(x) and bbar = Δ·b(x):
//
//   zoh        a = exp(x)               b = 1                                truncated.h
//   highorder  a = exp(x)               b = 1 + x/2                          truncated.h
//   poly       a = exp(x)               b = 1 + x/2 + x²/6                   truncated.h
//   rk4        a = exp(x)               b = 1 + x/2 + x²/6 + x³/24           truncated.h
//   foh        a = exp(x)               b = φ1(x) = (exp(x) − 1)/x           exact.h
//   bilinear   a = (1 + x/2)/(1 − x/2)  b = 1/(1 − x/2)                      tustin.h
//
// A seventh method takes one more entry in method.h and one more Formula; see formula.h.
#pragma once

#include "discretization/exact.h"
#include "discretization/formula.h"
#include "discretization/method.h"
#include "discretization/truncated.h"
#include "discretization/tustin.h"
