// For the instructions that every processor of the architecture has.
#include "kernel_table.h"
