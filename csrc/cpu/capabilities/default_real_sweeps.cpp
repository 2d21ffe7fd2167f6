// For the instructions that every processor of the architecture has.
#include "real_sweeps.h"
