// For the instructions that every processor of the architecture has.
#include "step.h"
